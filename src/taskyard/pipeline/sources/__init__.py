"""Sources read files and journals into DataFrames. They compute and write nothing."""
