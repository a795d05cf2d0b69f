"""What each recipe costs: an experiment as a queue of runs, and the page that gathers them."""
