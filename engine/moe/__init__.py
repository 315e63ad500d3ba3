"""The routed experts: what turns hidden states and routes into the experts' weighted sum."""
