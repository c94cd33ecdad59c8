"""Who prefills and who decodes: the cluster view, pure policies over it, and a record of every decision."""
