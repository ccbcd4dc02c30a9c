//! Rate limiting: a token bucket for each bearer token, and a smaller one for each address without
//! a valid token. A stream counts once, when it is opened.

use std::{
    hash::Hash,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    time::{Duration, Instant},
};

use axum::{
    extract::{ConnectInfo, Request, State},
    http::StatusCode,
    middleware::Next,
    response::Response,
};
use harvest_session::TokenBuckets;

use crate::{ServerState, problem::ApiError};

// The capacity of a bucket in seconds of its rate: opening fifty sessions at once is legitimate.
const BURST_SECONDS: u32 = 4;

// Requests without a token get this fraction of a token's rate.
const ANONYMOUS_DIVISOR: u32 = 10;

#[derive(Debug)]
pub(crate) struct RateLimits {
    tokens: TokenBuckets<String>,
    anonymous: TokenBuckets<IpAddr>,
}

impl RateLimits {
    /// `per_second` requests for each token; 0 disables the limit.
    pub(crate) fn new(per_second: u32) -> Self {
        let anonymous = per_second.div_ceil(ANONYMOUS_DIVISOR);
        Self { tokens: buckets(per_second), anonymous: buckets(anonymous) }
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

fn buckets<K: Eq + Hash>(per_second: u32) -> TokenBuckets<K> {
    TokenBuckets::new(per_second.saturating_mul(BURST_SECONDS), f64::from(per_second))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_has_a_burst_then_its_rate() {
        let (buckets, start) = (buckets(10), Instant::now());
        let take = |millis| buckets.take("ada", start + Duration::from_millis(millis)).is_ok();
        assert_eq!((0..50).filter(|_| take(0)).count(), 40);
        assert_eq!((0..50).filter(|_| take(1_000)).count(), 10);
    }

    #[test]
    fn ipv6_network_shares_one_bucket() {
        let of = |text: &str| ipv6_prefix(text.parse().unwrap());
        assert_eq!(of("2001:db8:1:2:3::4"), of("2001:db8:1:2::9"));
        assert_ne!(of("2001:db8:1:2::1"), of("2001:db8:1:3::1"));
        assert_eq!(of("::ffff:192.0.2.7"), of("192.0.2.7"));
    }
}
