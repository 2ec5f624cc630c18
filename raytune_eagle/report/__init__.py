"""Questions to the records, and pages made from them."""
