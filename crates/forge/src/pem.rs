//! Reads RSA keys from PEM files: private keys as PKCS#8 or PKCS#1, public keys as SPKI or PKCS#1.

use base64::{Engine, prelude::BASE64_STANDARD};
use ring::rsa::KeyPair;

/// The text is not an RSA key that can be used. The message never quotes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidKey {
    #[error("the key is not in PEM format")]
    NotPem,
    #[error("the PEM block is not an RSA key")]
    WrongKind,
    #[error("the RSA key is damaged, or has less than 2048 bits")]
    Rejected,
}

/// The private key of a GitHub App.
pub(crate) fn private_key(pem: &str) -> Result<KeyPair, InvalidKey> {
    let (label, der) = decode(pem)?;
    let key = match label {
        "PRIVATE KEY" => KeyPair::from_pkcs8(&der),
        "RSA PRIVATE KEY" => KeyPair::from_der(&der),
        _ => return Err(InvalidKey::WrongKind),
    };
    key.map_err(|_| InvalidKey::Rejected)
}

/// The public half of a key, as the DER of PKCS#1. Takes a private key too.
pub(crate) fn public_key(pem: &str) -> Result<Vec<u8>, InvalidKey> {
    let (label, der) = decode(pem)?;
    match label {
        "RSA PUBLIC KEY" => Ok(der),
        "PUBLIC KEY" => Ok(strip_spki(&der).ok_or(InvalidKey::WrongKind)?.to_vec()),
        _ => private_key(pem).map(|key| key.public().as_ref().to_vec()),
    }
}

fn decode(pem: &str) -> Result<(&str, Vec<u8>), InvalidKey> {
    let (_, rest) = pem.split_once("-----BEGIN ").ok_or(InvalidKey::NotPem)?;
    let (label, rest) = rest.split_once("-----").ok_or(InvalidKey::NotPem)?;
    let (body, _) = rest.split_once("-----END ").ok_or(InvalidKey::NotPem)?;
    let body: String = body.split_ascii_whitespace().collect();
    let der = BASE64_STANDARD.decode(body).map_err(|_| InvalidKey::NotPem)?;
    Ok((label, der))
}

/// The key inside a `SubjectPublicKeyInfo`, if it is an RSA key.
fn strip_spki(der: &[u8]) -> Option<&[u8]> {
    // AlgorithmIdentifier { rsaEncryption, NULL }, RFC 3279 section 2.3.1.
    const RSA: [u8; 15] = [0x30, 13, 6, 9, 42, 0x86, 0x48, 0x86, 0xf7, 13, 1, 1, 1, 5, 0];
    let content = der_value(der, 0x30)?;
    let bits = der_value(content.strip_prefix(&RSA)?, 0x03)?;
    // The number of unused bits.
    bits.strip_prefix(&[0])
}

/// The content of a DER value that has this tag and fills `der`.
fn der_value(der: &[u8], tag: u8) -> Option<&[u8]> {
    let rest = der.strip_prefix(&[tag])?;
    let (first, rest) = rest.split_first()?;
    let (length, content) = if *first < 0x80 {
        (usize::from(*first), rest)
    } else {
        let (bytes, content) = rest.split_at_checked(usize::from(first & 0x7f))?;
        if bytes.len() > 3 {
            return None;
        }
        let length = bytes.iter().fold(0, |length, byte| length << 8 | usize::from(*byte));
        (length, content)
    };
    (content.len() == length).then_some(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_keys_are_refused_without_quotation() {
        for (pem, error) in [
            ("s3cret", InvalidKey::NotPem),
            ("-----BEGIN PRIVATE KEY-----\n!!\n-----END PRIVATE KEY-----", InvalidKey::NotPem),
            ("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----", InvalidKey::Rejected),
            ("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----", InvalidKey::WrongKind),
            ("-----BEGIN EC KEY-----\nAAAA\n-----END EC KEY-----", InvalidKey::WrongKind),
        ] {
            assert_eq!(public_key(pem), Err(error), "{pem}");
        }
    }
}
