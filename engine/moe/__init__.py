"""The routed experts: from hidden states and routes to the experts' weighted sum."""
