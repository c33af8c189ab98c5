"""Transforms: functions from DataFrames to a DataFrame. No session, no reading, no writing."""
