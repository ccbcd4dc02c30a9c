//! Rate limiting: a token bucket for each key.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

// More than the users and addresses of any real server; bounds memory in a flood of addresses.
const MAX_KEYS: usize = 10_000;

/// Token buckets, one per key.
#[derive(Debug)]
pub struct TokenBuckets<K> {
    capacity: f64,
    per_second: f64,
    buckets: Mutex<HashMap<K, Bucket>>,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    left: f64,
    at: Instant,
}

impl<K: Eq + Hash> TokenBuckets<K> {
    /// Buckets that are full at first, and are refilled at a rate; 0 disables the limit.
    #[must_use]
    pub fn new(capacity: u32, per_second: f64) -> Self {
        Self { capacity: f64::from(capacity), per_second, buckets: Mutex::default() }
    }

    /// Takes one token.
    ///
    /// # Errors
    /// How long to wait for one.
    pub fn take(&self, key: K, now: Instant) -> Result<(), Duration> {
        if self.per_second == 0.0 {
            return Ok(());
        }
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        if buckets.len() >= MAX_KEYS && !buckets.contains_key(&key) {
            buckets.retain(|_, bucket| self.refilled(*bucket, now) < self.capacity);
            if buckets.len() >= MAX_KEYS {
                buckets.clear();
            }
        }
        let bucket = buckets.entry(key).or_insert(Bucket { left: self.capacity, at: now });
        bucket.left = self.refilled(*bucket, now);
        bucket.at = now;
        if bucket.left < 1.0 {
            return Err(Duration::from_secs_f64((1.0 - bucket.left) / self.per_second));
        }
        bucket.left -= 1.0;
        Ok(())
    }

    fn refilled(&self, bucket: Bucket, now: Instant) -> f64 {
        let since = now.saturating_duration_since(bucket.at).as_secs_f64();
        (bucket.left + since * self.per_second).min(self.capacity)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_allows_a_burst_then_its_rate() {
        let (buckets, start) = (TokenBuckets::new(40, 10.0), Instant::now());
        let take = |millis| buckets.take("ada", start + Duration::from_millis(millis)).is_ok();
        assert_eq!((0..50).filter(|_| take(0)).count(), 40);
        assert_eq!((0..50).filter(|_| take(1_000)).count(), 10);
        assert!(!take(1_050) && take(1_100) && !take(1_100));
        // A pause refills the bucket up to its capacity.
        assert_eq!((0..100).filter(|_| take(1_000_000)).count(), 40);
    }

    #[test]
    fn keys_are_independent_and_waits_are_reported() {
        let (buckets, now) = (TokenBuckets::new(4, 1.0), Instant::now());
        while buckets.take("ada", now).is_ok() {}
        assert_eq!(buckets.take("ada", now), Err(Duration::from_secs(1)));
        assert!(buckets.take("bob", now).is_ok());
        let unlimited = TokenBuckets::new(0, 0.0);
        assert!((0..1_000).all(|_| unlimited.take("ada", now).is_ok()));
    }

    #[test]
    fn flood_of_addresses_is_bounded() {
        let (buckets, now) = (TokenBuckets::new(4, 1.0), Instant::now());
        for key in 0..MAX_KEYS * 3 {
            let _ = buckets.take(key, now);
        }
        assert!(buckets.buckets.lock().unwrap().len() <= MAX_KEYS);
    }
}
