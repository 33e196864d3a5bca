"""Makes the bundled target model: code corpus, tokenizer, pretraining, chat tuning, samples. See README.md here."""
