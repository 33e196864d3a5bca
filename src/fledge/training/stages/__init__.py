"""The stages of `fledge train`. A stage reads what earlier ones wrote and fills one directory."""
