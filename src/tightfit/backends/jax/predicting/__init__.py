"""Predicting: XLA compiles the real step for a GPU that need not be there, and says what memory it will take."""
