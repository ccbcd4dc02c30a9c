//! Rate limiting: a token bucket for each bearer token, and a smaller one for each address without
//! a valid token. A stream counts once, when it is opened.

use std::{
    collections::HashMap,
    hash::Hash,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    extract::{ConnectInfo, Request, State},
    http::StatusCode,
    middleware::Next,
    response::Response,
};

use crate::{ServerState, problem::ApiError};

// The capacity of a bucket in seconds of its rate: opening fifty sessions at once is legitimate.
const BURST_SECONDS: u32 = 4;

// Requests without a token get this fraction of a token's rate.
const ANONYMOUS_DIVISOR: u32 = 10;

// More than the users and addresses of any real server; bounds memory in a flood of addresses.
const MAX_KEYS: usize = 10_000;

#[derive(Debug)]
pub(crate) struct RateLimits {
    tokens: Buckets<String>,
    anonymous: Buckets<IpAddr>,
}

impl RateLimits {
    /// `per_second` requests for each token; 0 disables the limit.
    pub(crate) fn new(per_second: u32) -> Self {
        let anonymous = per_second.div_ceil(ANONYMOUS_DIVISOR);
        Self { tokens: Buckets::new(per_second), anonymous: Buckets::new(anonymous) }
    }

    /// Counts a request with a known token.
    pub(crate) fn token(&self, name: &str) -> Result<(), ApiError> {
        self.tokens.take(name.to_owned(), Instant::now()).map_err(too_many)
    }

    /// Counts a request without a known token.
    pub(crate) fn anonymous(&self, peer: Option<SocketAddr>) -> Result<(), ApiError> {
        let address = peer.map_or(IpAddr::V6(Ipv6Addr::UNSPECIFIED), |peer| ipv6_prefix(peer.ip()));
        self.anonymous.take(address, Instant::now()).map_err(too_many)
    }
}

/// Limits requests to routes that require no token.
pub(crate) async fn limit_anonymous(
    State(state): State<ServerState>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    state.rate_limits.anonymous(peer(&request))?;
    Ok(next.run(request).await)
}

/// The client's address; `None` when the router is called without a socket.
pub(crate) fn peer(request: &Request) -> Option<SocketAddr> {
    request.extensions().get::<ConnectInfo<SocketAddr>>().map(|info| info.0)
}

fn too_many(wait: Duration) -> ApiError {
    let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
    let detail = "too many requests from this token or address";
    ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limited", detail)
        .hint(format!("retry in {seconds} s; the setting `rate_limit` raises the limit"))
        .retry_after(seconds)
}

/// The /64 prefix of an IPv6 address, because a client controls all addresses of its network.
pub(crate) fn ipv6_prefix(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => {
            let [a, b, c, d, ..] = v6.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
        v4 => v4,
    }
}

/// Token buckets, one per key.
#[derive(Debug)]
struct Buckets<K> {
    per_second: f64,
    capacity: f64,
    buckets: Mutex<HashMap<K, Bucket>>,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    left: f64,
    at: Instant,
}

impl<K: Eq + Hash> Buckets<K> {
    fn new(per_second: u32) -> Self {
        let capacity = f64::from(per_second.saturating_mul(BURST_SECONDS));
        Self { per_second: f64::from(per_second), capacity, buckets: Mutex::default() }
    }

    /// Takes one token, or returns how long to wait for one.
    fn take(&self, key: K, now: Instant) -> Result<(), Duration> {
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
        let (buckets, start) = (Buckets::new(10), Instant::now());
        let take = |millis| buckets.take("ada", start + Duration::from_millis(millis)).is_ok();
        assert_eq!((0..50).filter(|_| take(0)).count(), 40);
        assert_eq!((0..50).filter(|_| take(1_000)).count(), 10);
        assert!(!take(1_050) && take(1_100) && !take(1_100));
        // A pause refills the bucket up to its capacity.
        assert_eq!((0..100).filter(|_| take(1_000_000)).count(), 40);
    }

    #[test]
    fn keys_are_independent_and_waits_are_reported() {
        let (buckets, now) = (Buckets::new(1), Instant::now());
        while buckets.take("ada", now).is_ok() {}
        assert_eq!(buckets.take("ada", now), Err(Duration::from_secs(1)));
        assert!(buckets.take("bob", now).is_ok());
        let unlimited = Buckets::new(0);
        assert!((0..1_000).all(|_| unlimited.take("ada", now).is_ok()));
    }

    #[test]
    fn flood_of_addresses_is_bounded() {
        let (buckets, now) = (Buckets::new(1), Instant::now());
        for key in 0..MAX_KEYS * 3 {
            let _ = buckets.take(key, now);
        }
        assert!(buckets.buckets.lock().unwrap().len() <= MAX_KEYS);
    }

    #[test]
    fn ipv6_network_shares_one_bucket() {
        let of = |text: &str| ipv6_prefix(text.parse().unwrap());
        assert_eq!(of("2001:db8:1:2:3::4"), of("2001:db8:1:2::9"));
        assert_ne!(of("2001:db8:1:2::1"), of("2001:db8:1:3::1"));
        assert_eq!(of("::ffff:192.0.2.7"), of("192.0.2.7"));
    }
}
