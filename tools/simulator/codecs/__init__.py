"""Codecs of the model peers, one class for each dialect and role."""
