//! The certificate authority of a home. Sandboxes trust it, so that the gateway can end their TLS
//! connections to the hosts that secrets are for. Its private key is stored sealed by the vault.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, SystemTime},
};

use base64::{Engine, prelude::BASE64_STANDARD};
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyIdMethod, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, SerialNumber,
    SignatureAlgorithm, SigningKey, date_time_ymd,
};
use ring::{
    digest::{SHA256, digest},
    rand::{SecureRandom, SystemRandom},
    signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair as _},
};
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer},
};
use serde::{Deserialize, Serialize};

use crate::vault::{Vault, VaultError};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const AUTHORITY_LIFETIME: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);
// Of the certificate of one connection, which may stay open for long.
const LEAF_LIFETIME: Duration = Duration::from_secs(30 * 24 * 60 * 60);

// Lines of the PEM format (RFC 7468, 2).
const PEM_COLUMNS: usize = 64;

/// Why there is no certificate authority.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    #[error("the stored certificate authority is damaged")]
    Damaged,
    #[error("cannot open the certificate authority")]
    Vault(#[from] VaultError),
    #[error("cannot make a certificate")]
    Certificate(#[from] rcgen::Error),
    #[error("cannot use a certificate for TLS")]
    Tls(#[from] rustls::Error),
}

/// The stored form.
#[derive(Serialize, Deserialize)]
struct Stored {
    name: String,
    certificate: String,
    sealed_key: String,
}

/// Issues a certificate for each connection that the gateway ends.
pub struct Authority {
    pem: String,
    certificate: CertificateDer<'static>,
    issuer: Issuer<'static, Key>,
    /// The key of all certificates that it issues.
    leaf_key: Key,
}

/// A key of ECDSA on P-256, which every client knows.
struct Key {
    pkcs8: Vec<u8>,
    pair: EcdsaKeyPair,
}

impl Key {
    fn generate() -> Result<Self, AuthorityError> {
        let random = SystemRandom::new();
        let pkcs8 = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &random);
        Self::open(pkcs8.map_err(|_| VaultError::Random)?.as_ref().to_vec())
    }

    fn open(pkcs8: Vec<u8>) -> Result<Self, AuthorityError> {
        let (kind, random) = (&ECDSA_P256_SHA256_ASN1_SIGNING, SystemRandom::new());
        let pair = EcdsaKeyPair::from_pkcs8(kind, &pkcs8, &random);
        Ok(Self { pair: pair.map_err(|_| AuthorityError::Damaged)?, pkcs8 })
    }

    /// The identifier of an issuer's key: RFC 7093, 2, method 1.
    fn identifier(&self) -> KeyIdMethod {
        KeyIdMethod::PreSpecified(digest(&SHA256, self.der_bytes()).as_ref()[..20].to_vec())
    }
}

impl PublicKeyData for Key {
    fn der_bytes(&self) -> &[u8] {
        self.pair.public_key().as_ref()
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

impl SigningKey for Key {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        let signed = self.pair.sign(&SystemRandom::new(), message);
        signed.map(|signed| signed.as_ref().to_vec()).map_err(|_| rcgen::Error::RemoteKeyError)
    }
}

impl fmt::Debug for Authority {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Authority(***)")
    }
}

impl Authority {
    /// Makes an authority and returns its stored form.
    ///
    /// # Errors
    /// When the system has no randomness.
    pub fn create(vault: &Vault) -> Result<String, AuthorityError> {
        let name = format!("Harvest {:08x}", u32::from_be_bytes(random()?));
        let key = Key::generate()?;
        let certificate = params(&name, &key)?.self_signed(&key)?;
        let stored = Stored {
            name,
            certificate: BASE64_STANDARD.encode(certificate.der()),
            sealed_key: BASE64_STANDARD.encode(vault.seal_authority(key.pkcs8.clone())?),
        };
        Ok(serde_json::to_string(&stored).expect("texts are JSON"))
    }

    /// Opens an authority from its stored form.
    ///
    /// # Errors
    /// When the stored form is damaged or was sealed with another key.
    pub fn open(vault: &Vault, stored: &str) -> Result<Self, AuthorityError> {
        let stored: Stored = serde_json::from_str(stored).map_err(|_| AuthorityError::Damaged)?;
        let decode = |text: &str| BASE64_STANDARD.decode(text).map_err(|_| AuthorityError::Damaged);
        let key = vault.unseal_authority(&decode(&stored.sealed_key)?)?;
        let (key, certificate) = (Key::open(key)?, decode(&stored.certificate)?);
        Ok(Self {
            pem: pem(&certificate),
            certificate: certificate.into(),
            issuer: Issuer::new(params(&stored.name, &key)?, key),
            leaf_key: Key::generate()?,
        })
    }

    /// The certificate that sandboxes trust, in PEM.
    #[must_use]
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// The certificate that sandboxes trust.
    #[must_use]
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// The TLS settings of a connection that a sandbox opened to a host.
    ///
    /// # Errors
    /// When the host is not a host name.
    pub fn server_config(&self, host: &str) -> Result<Arc<ServerConfig>, AuthorityError> {
        let leaf = self.issue(host)?;
        let key = PrivatePkcs8KeyDer::from(self.leaf_key.pkcs8.clone());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![leaf.der().clone()], PrivateKeyDer::from(key))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }

    fn issue(&self, host: &str) -> Result<Certificate, AuthorityError> {
        let mut leaf = CertificateParams::new(vec![host.to_owned()])?;
        // The common name holds at most 64 characters; the alternative name is what counts.
        leaf.distinguished_name.push(DnType::CommonName, "Harvest gateway");
        leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        leaf.use_authority_key_identifier_extension = true;
        let (since, epoch) = (since_epoch(), date_time_ymd(1970, 1, 1));
        let at = |since: Duration| epoch + since;
        (leaf.not_before, leaf.not_after) = (at(since - DAY), at(since + LEAF_LIFETIME));
        leaf.serial_number = Some(SerialNumber::from_slice(&random::<16>()?));
        Ok(leaf.signed_by(&self.leaf_key, &self.issuer)?)
    }
}

fn params(name: &str, key: &Key) -> Result<CertificateParams, AuthorityError> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.distinguished_name.push(DnType::CommonName, name);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.key_identifier_method = key.identifier();
    params.serial_number = Some(SerialNumber::from_slice(&random::<16>()?));
    let (since, epoch) = (since_epoch(), date_time_ymd(1970, 1, 1));
    let at = |since: Duration| epoch + since;
    (params.not_before, params.not_after) = (at(since - DAY), at(since + AUTHORITY_LIFETIME));
    Ok(params)
}

fn random<const BYTES: usize>() -> Result<[u8; BYTES], VaultError> {
    let mut bytes = [0; BYTES];
    SystemRandom::new().fill(&mut bytes).map_err(|_| VaultError::Random)?;
    // A serial number is positive and has no leading zeros.
    bytes[0] = bytes[0] & 0x7f | 0x40;
    Ok(bytes)
}

fn since_epoch() -> Duration {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    // A clock before 1970 is wrong by more than a day; no certificate could be right.
    now.unwrap_or_default().max(DAY)
}

fn pem(der: &[u8]) -> String {
    let text = BASE64_STANDARD.encode(der);
    let lines = text.as_bytes().chunks(PEM_COLUMNS).map(String::from_utf8_lossy);
    let body: String = lines.map(|line| format!("{line}\n")).collect();
    format!("-----BEGIN CERTIFICATE-----\n{body}-----END CERTIFICATE-----\n")
}
