"""Who is in the cluster: peers, heartbeats, calls between them, what each can do."""
