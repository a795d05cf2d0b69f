"""GPT-2, as Hugging Face's files hold it."""
