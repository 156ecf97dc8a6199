"""How much each layer loses under each treatment, and which treatment it should have."""
