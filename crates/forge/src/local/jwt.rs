//! Checks the JSON web tokens of Apps as GitHub does: RS256, issued in the past, valid for at most
//! ten minutes. Nothing of a token gets into a message.

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use harvest_proto::Timestamp;
use ring::signature::{RSA_PKCS1_2048_8192_SHA256, UnparsedPublicKey};
use serde::Deserialize;

// Clocks of clients and of this machine differ.
const CLOCK_SKEW_SECONDS: i64 = 60;
const MAX_VALIDITY_SECONDS: i64 = 600;
// A real one has 300 bytes.
const MAX_BYTES: usize = 8 * 1024;

/// Why a token was refused, in GitHub's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum JwtError {
    #[error("A JSON web token could not be decoded")]
    Malformed,
    #[error(
        "'Issued at' claim ('iat') must be an Integer representing the time that the assertion was issued"
    )]
    IssuedAt,
    #[error(
        "'Expiration time' claim ('exp') must be a numeric value representing the future time at which the assertion expires"
    )]
    Expired,
    #[error("'Expiration time' claim ('exp') is too far in the future")]
    TooLong,
}

#[derive(Debug, Deserialize)]
struct Header {
    alg: String,
}

#[derive(Debug, Deserialize)]
struct Claims {
    iat: i64,
    exp: i64,
    iss: Issuer,
}

// GitHub takes the id as a number and as a string.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Issuer {
    Number(u64),
    Text(String),
}

/// A token whose signature has not been checked.
#[derive(Debug)]
pub(super) struct UnverifiedJwt<'t> {
    signed: &'t str,
    signature: Vec<u8>,
    claims: Claims,
}

/// Whether the text has the form of a JSON web token; other tokens have no dots.
pub(super) fn is_jwt(token: &str) -> bool {
    token.starts_with("ey") && token.split('.').count() == 3
}

impl<'t> UnverifiedJwt<'t> {
    pub(super) fn parse(token: &'t str) -> Result<Self, JwtError> {
        Self::decode(token).filter(|_| token.len() <= MAX_BYTES).ok_or(JwtError::Malformed)
    }

    fn decode(token: &'t str) -> Option<Self> {
        let (signed, signature) = token.rsplit_once('.')?;
        let (header, claims) = signed.split_once('.')?;
        let decode = |part: &str| BASE64_URL_SAFE_NO_PAD.decode(part).ok();
        let header: Header = serde_json::from_slice(&decode(header)?).ok()?;
        // Any other algorithm would let the client choose how it is checked.
        if header.alg != "RS256" {
            return None;
        }
        let claims = serde_json::from_slice(&decode(claims)?).ok()?;
        Some(Self { signed, signature: decode(signature)?, claims })
    }

    /// The id of the App that the token names.
    pub(super) fn issuer(&self) -> Option<u64> {
        match &self.claims.iss {
            Issuer::Number(id) => Some(*id),
            Issuer::Text(id) => id.parse().ok(),
        }
    }

    /// Checks signature and times. `key` is the DER of a PKCS#1 public key.
    pub(super) fn verify(&self, key: &[u8], now: Timestamp) -> Result<(), JwtError> {
        UnparsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, key)
            .verify(self.signed.as_bytes(), &self.signature)
            .map_err(|_| JwtError::Malformed)?;
        check_times(&self.claims, now.as_millis().div_euclid(1000))
    }
}

fn check_times(claims: &Claims, now: i64) -> Result<(), JwtError> {
    if claims.iat > now.saturating_add(CLOCK_SKEW_SECONDS) {
        return Err(JwtError::IssuedAt);
    }
    if claims.exp <= now {
        return Err(JwtError::Expired);
    }
    if claims.exp > now.saturating_add(MAX_VALIDITY_SECONDS + CLOCK_SKEW_SECONDS) {
        return Err(JwtError::TooLong);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_checked_with_clock_skew() {
        let now = 1_000_000;
        for (iat, exp, expected) in [
            (-60, 540, Ok(())),
            (0, 600, Ok(())),
            (60, 660, Ok(())),
            (61, 600, Err(JwtError::IssuedAt)),
            (-700, 0, Err(JwtError::Expired)),
            (-60, 661, Err(JwtError::TooLong)),
        ] {
            let claims = Claims { iat: now + iat, exp: now + exp, iss: Issuer::Number(1) };
            assert_eq!(check_times(&claims, now), expected, "{iat} {exp}");
        }
    }

    #[test]
    fn only_rs256_tokens_are_decoded() {
        let encode = |json: &str| BASE64_URL_SAFE_NO_PAD.encode(json);
        let claims = encode(r#"{"iat":1,"exp":2,"iss":"7"}"#);
        let token = |header: &str| format!("{}.{claims}.AAAA", encode(header));
        let good = token(r#"{"alg":"RS256","typ":"JWT"}"#);
        assert_eq!(UnverifiedJwt::parse(&good).unwrap().issuer(), Some(7));
        for bad in [
            token(r#"{"alg":"none"}"#),
            token(r#"{"alg":"HS256"}"#),
            good.replace('.', ""),
            String::new(),
            format!("{good}{}", "A".repeat(MAX_BYTES)),
        ] {
            assert_eq!(UnverifiedJwt::parse(&bad).unwrap_err(), JwtError::Malformed, "{bad}");
        }
    }
}
