"""Sources: from files and journals to datasets. They read; they compute and write nothing."""
