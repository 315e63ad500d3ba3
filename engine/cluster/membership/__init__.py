"""The membership of the cluster: peers, heartbeats, calls between them, and their abilities."""
