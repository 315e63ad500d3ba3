"""Model families: the names and layouts of their weights, and the settings of their config.json."""
