"""What bench, drift, eval and the model cards show: intervals, charts, tables, pages."""
