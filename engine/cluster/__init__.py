"""Several machines run one model: expert parallelism, one all-gather per MoE layer."""
