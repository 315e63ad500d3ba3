"""A machine that is lent: it loads its shard and follows the head."""
