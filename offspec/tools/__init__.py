"""What measures, checks and explains: for `offspec bench`, `verify` and `doctor`."""
