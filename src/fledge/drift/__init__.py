"""Attention drift: where a drafter looks as it drafts deeper, what its states do meanwhile, and what that costs."""
