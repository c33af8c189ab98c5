"""Write the pages and tables of docs/ that are generated from the code."""
