"""A machine that is lent: it loads its share and follows the head."""
