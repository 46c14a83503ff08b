"""From logits to tokens: processors, draws, logprobs."""
