"""From logits to text: sampling, beam search, stopping."""
