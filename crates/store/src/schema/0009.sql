ALTER TABLE idempotency_keys ADD COLUMN made TEXT;
