"""The exchange between the nodes of a ring: a node's place, links and frames, transports and the choice among them."""
