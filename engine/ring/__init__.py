"""The ring: machines that share one model's experts, with one exchange per MoE layer."""
