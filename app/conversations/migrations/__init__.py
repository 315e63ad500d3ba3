"""The database's schema: one file per migration, ``NNNN_name.sql``, applied in order and never changed afterwards."""
