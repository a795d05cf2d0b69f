"""What a run on many GPUs would take, before there are any: memory, bytes and time of a step."""
