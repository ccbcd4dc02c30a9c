//! How often somebody may ask: a token bucket for each bearer token, and a smaller one for each address
//! that shows none. A stream counts once, when it is asked for.

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
    response::{IntoResponse, Response},
};

use crate::{ServerState, problem::ApiError};

/// A bucket holds what so many seconds let in: opening fifty sessions at once is no abuse.
const BURST_SECONDS: u32 = 4;

/// Strangers get this part of what a token gets.
const STRANGERS: u32 = 10;

// Far more than people or honest addresses; a flood of forged ones must not fill the memory.
const MOST_KEYS: usize = 10_000;

/// The limits of one server.
#[derive(Debug)]
pub(crate) struct Rates {
    tokens: Buckets<String>,
    strangers: Buckets<IpAddr>,
}

impl Rates {
    /// `per_second` requests for each token; 0 is no limit.
    pub(crate) fn new(per_second: u32) -> Self {
        let strangers = per_second.div_ceil(STRANGERS);
        Self { tokens: Buckets::new(per_second), strangers: Buckets::new(strangers) }
    }

    /// Counts a request with a known token.
    pub(crate) fn token(&self, name: &str) -> Result<(), ApiError> {
        self.tokens.take(name.to_owned(), Instant::now()).map_err(too_many)
    }

    /// Counts a request without one.
    pub(crate) fn stranger(&self, request: Option<SocketAddr>) -> Result<(), ApiError> {
        let address =
            request.map_or(IpAddr::V6(Ipv6Addr::UNSPECIFIED), |peer| household(peer.ip()));
        self.strangers.take(address, Instant::now()).map_err(too_many)
    }
}

/// Counts requests to routes that ask for no token.
pub(crate) async fn count_strangers(
    State(state): State<ServerState>,
    request: Request,
    next: Next,
) -> Response {
    match state.rates.stranger(peer(&request)) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

/// Where a request comes from; not known when the router is called without a socket.
pub(crate) fn peer(request: &Request) -> Option<SocketAddr> {
    request.extensions().get::<ConnectInfo<SocketAddr>>().map(|info| info.0)
}

fn too_many(wait: Duration) -> ApiError {
    let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
    let detail = "more requests than this server takes from one token or address";
    ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limited", detail)
        .hint(format!(
            "ask again in {seconds} s; `rate_limit` in the server's configuration says how many"
        ))
        .retry_after(seconds)
}

/// Whoever has one address of a v6 network has them all.
fn household(address: IpAddr) -> IpAddr {
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
    most: f64,
    buckets: Mutex<HashMap<K, Bucket>>,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    left: f64,
    at: Instant,
}

impl<K: Eq + Hash> Buckets<K> {
    fn new(per_second: u32) -> Self {
        let most = f64::from(per_second.saturating_mul(BURST_SECONDS));
        Self { per_second: f64::from(per_second), most, buckets: Mutex::default() }
    }

    /// Takes one, or says how long to wait for it.
    fn take(&self, key: K, now: Instant) -> Result<(), Duration> {
        if self.per_second == 0.0 {
            return Ok(());
        }
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        if buckets.len() >= MOST_KEYS && !buckets.contains_key(&key) {
            buckets.retain(|_, bucket| self.filled(*bucket, now) < self.most);
            if buckets.len() >= MOST_KEYS {
                buckets.clear();
            }
        }
        let bucket = buckets.entry(key).or_insert(Bucket { left: self.most, at: now });
        bucket.left = self.filled(*bucket, now);
        bucket.at = now;
        if bucket.left < 1.0 {
            return Err(Duration::from_secs_f64((1.0 - bucket.left) / self.per_second));
        }
        bucket.left -= 1.0;
        Ok(())
    }

    fn filled(&self, bucket: Bucket, now: Instant) -> f64 {
        let since = now.saturating_duration_since(bucket.at).as_secs_f64();
        (bucket.left + since * self.per_second).min(self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_lets_a_burst_in_and_then_its_rate() {
        let (buckets, start) = (Buckets::new(10), Instant::now());
        let take = |millis| buckets.take("ada", start + Duration::from_millis(millis)).is_ok();
        assert_eq!((0..50).filter(|_| take(0)).count(), 40);
        assert_eq!((0..50).filter(|_| take(1_000)).count(), 10);
        assert!(!take(1_050) && take(1_100) && !take(1_100));
        // A pause fills it, but no further than its size.
        assert_eq!((0..100).filter(|_| take(1_000_000)).count(), 40);
    }

    #[test]
    fn one_key_does_not_empty_anothers_bucket_and_who_waits_is_told_how_long() {
        let (buckets, now) = (Buckets::new(1), Instant::now());
        while buckets.take("ada", now).is_ok() {}
        assert_eq!(buckets.take("ada", now), Err(Duration::from_secs(1)));
        assert!(buckets.take("bob", now).is_ok());
        let none = Buckets::new(0);
        assert!((0..1_000).all(|_| none.take("ada", now).is_ok()));
    }

    #[test]
    fn a_flood_of_addresses_does_not_fill_the_memory() {
        let (buckets, now) = (Buckets::new(1), Instant::now());
        for key in 0..MOST_KEYS * 3 {
            let _ = buckets.take(key, now);
        }
        assert!(buckets.buckets.lock().unwrap().len() <= MOST_KEYS);
    }

    #[test]
    fn a_v6_network_is_one_household() {
        let of = |text: &str| household(text.parse().unwrap());
        assert_eq!(of("2001:db8:1:2:3::4"), of("2001:db8:1:2::9"));
        assert_ne!(of("2001:db8:1:2::1"), of("2001:db8:1:3::1"));
        assert_eq!(of("::ffff:192.0.2.7"), of("192.0.2.7"));
    }
}
