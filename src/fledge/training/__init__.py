"""From a target and prompts to a drafter: data, capture of hidden states, training-time test, trainer, pipeline."""
