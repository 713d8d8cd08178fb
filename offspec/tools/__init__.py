"""What measures, checks and explains: for `offspec bench`, `verify`, `plan` and `doctor`."""
