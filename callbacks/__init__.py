"""Lightning callbacks. They read the training and never change a bit of it."""
