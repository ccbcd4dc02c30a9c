//! Encryption of stored secrets. Knows nothing about permissions.
//!
//! A sealed secret is one version byte, a nonce of 12 random bytes, and the value encrypted with
//! AES-256-GCM. The secret's owner and name are associated data, so that a sealed value cannot be
//! moved to another owner or name.

use std::{
    borrow::Cow,
    fmt, fs,
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::Path,
    str::FromStr,
    sync::atomic::{AtomicU64, Ordering},
};

use base64::{Engine, prelude::BASE64_STANDARD};
use harvest_proto::{Hint, Secret, SecretOwner};
use ring::{
    aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey},
    hmac::{self, HMAC_SHA256},
    rand::{SecureRandom, SystemRandom},
};

const VERSION: u8 = 1;
const KEY_BYTES: usize = 32;
const AUTHORITY: &str = "harvest certificate authority";
const FINGERPRINTS: &[u8] = b"harvest fingerprints of requests";

#[derive(Debug, thiserror::Error)]
pub enum VaultError {
    #[error("cannot {doing} the key file `{path}`")]
    KeyFile { doing: &'static str, path: String, source: io::Error },
    #[error("the key file `{path}` {problem}")]
    InvalidKey { path: String, problem: &'static str },
    /// The bytes are damaged, belong to another name or were sealed with another key.
    #[error("cannot decrypt secret `{name}` with this key")]
    CannotDecrypt { name: SecretName },
    /// The certificate authority was sealed with another key, or is damaged.
    #[error("cannot decrypt the key of the certificate authority")]
    CannotDecryptAuthority,
    #[error("the system's random number generator failed")]
    Random,
}

impl Hint for VaultError {
    fn hint(&self) -> Option<Cow<'_, str>> {
        match self {
            Self::CannotDecrypt { name } => Some(
                format!(
                    "set it again with `harvest secret set {name}`, or restore the home's vault.key"
                )
                .into(),
            ),
            Self::KeyFile { source, .. } => source.hint(),
            Self::InvalidKey { .. } | Self::CannotDecryptAuthority | Self::Random => None,
        }
    }
}

/// Name of a secret: a capital letter, then up to 127 capital letters, digits and underscores.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SecretName(String);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "a secret's name is a capital letter followed by at most 127 capital letters, digits and underscores"
)]
pub struct SecretNameError;

impl SecretName {
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for SecretName {
    type Err = SecretNameError;

    fn from_str(text: &str) -> Result<Self, SecretNameError> {
        let valid = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_';
        let begins = text.as_bytes().first().is_some_and(u8::is_ascii_uppercase);
        (begins && text.len() <= 128 && text.bytes().all(valid))
            .then(|| Self(text.to_owned()))
            .ok_or(SecretNameError)
    }
}

impl fmt::Display for SecretName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

/// Seals and unseals secrets with a key from a file that only its owner can read.
pub struct Vault {
    key: LessSafeKey,
    /// Derived from the key file, for [`Vault::fingerprint`].
    fingerprints: hmac::Key,
    /// How many secrets were stored or removed in this process.
    revision: AtomicU64,
    random: SystemRandom,
    on_value: fn(&Secret<String>),
}

impl fmt::Debug for Vault {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Vault(***)")
    }
}

impl Vault {
    /// Calls `on_value` with every sealed or unsealed value, so that the log can redact it.
    #[must_use]
    pub fn with_observer(self, on_value: fn(&Secret<String>)) -> Self {
        Self { on_value, ..self }
    }

    /// Opens the vault with the key in this file; creates the file if needed.
    pub fn open(path: &Path) -> Result<Self, VaultError> {
        let random = SystemRandom::new();
        let bytes = match read_key(path) {
            Err(VaultError::KeyFile { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                create_key(path, &random)?;
                read_key(path)?
            }
            other => other?,
        };
        let key = UnboundKey::new(&AES_256_GCM, &bytes).expect("32 bytes are a key of AES-256");
        let derived = hmac::sign(&hmac::Key::new(HMAC_SHA256, &bytes), FINGERPRINTS);
        let fingerprints = hmac::Key::new(HMAC_SHA256, derived.as_ref());
        let (key, revision) = (LessSafeKey::new(key), AtomicU64::new(0));
        Ok(Self { key, fingerprints, revision, random, on_value: |_| {} })
    }

    /// Encrypts a value for storage.
    pub fn seal(
        &self,
        owner: &SecretOwner,
        name: &SecretName,
        value: &Secret<String>,
    ) -> Result<Vec<u8>, VaultError> {
        (self.on_value)(value);
        self.seal_bytes(label(owner, name), value.expose().clone().into_bytes())
    }

    /// Decrypts a stored value.
    pub fn unseal(
        &self,
        owner: &SecretOwner,
        name: &SecretName,
        sealed: &[u8],
    ) -> Result<Secret<String>, VaultError> {
        self.unseal_bytes(label(owner, name), sealed)
            .and_then(|bytes| String::from_utf8(bytes).ok())
            .map(Secret::new)
            .inspect(self.on_value)
            .ok_or_else(|| VaultError::CannotDecrypt { name: name.clone() })
    }

    /// Encrypts the private key of the certificate authority.
    pub(crate) fn seal_authority(&self, key: Vec<u8>) -> Result<Vec<u8>, VaultError> {
        self.seal_bytes(AUTHORITY.to_owned(), key)
    }

    /// Decrypts the private key of the certificate authority.
    pub(crate) fn unseal_authority(&self, sealed: &[u8]) -> Result<Vec<u8>, VaultError> {
        self.unseal_bytes(AUTHORITY.to_owned(), sealed).ok_or(VaultError::CannotDecryptAuthority)
    }

    /// Notes that a secret was stored or removed.
    pub fn mark_change(&self) {
        self.revision.fetch_add(1, Ordering::AcqRel);
    }

    /// A number that changes after secrets do, for what reads them once.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.revision.load(Ordering::Acquire)
    }

    /// A hash of a request that may contain secrets: without the key it reveals nothing about them.
    #[must_use]
    pub fn fingerprint(&self, request: &[u8]) -> [u8; 32] {
        let tag = hmac::sign(&self.fingerprints, request);
        tag.as_ref().try_into().expect("a tag of HMAC-SHA-256 has 32 bytes")
    }

    fn seal_bytes(&self, label: String, mut body: Vec<u8>) -> Result<Vec<u8>, VaultError> {
        let mut nonce = [0; NONCE_LEN];
        self.random.fill(&mut nonce).map_err(|_| VaultError::Random)?;
        self.key
            .seal_in_place_append_tag(
                Nonce::assume_unique_for_key(nonce),
                Aad::from(label.into_bytes()),
                &mut body,
            )
            .expect("a secret is shorter than the 64 GiB limit of a nonce");
        Ok([&[VERSION], &nonce[..], &body].concat())
    }

    fn unseal_bytes(&self, label: String, sealed: &[u8]) -> Option<Vec<u8>> {
        let (nonce, body) = sealed.strip_prefix(&[VERSION])?.split_first_chunk::<NONCE_LEN>()?;
        let mut body = body.to_vec();
        let nonce = Nonce::assume_unique_for_key(*nonce);
        let label = Aad::from(label.into_bytes());
        let length = self.key.open_in_place(nonce, label, &mut body).ok()?.len();
        body.truncate(length);
        Some(body)
    }
}

/// Replaces every secret in a text by `***`, also in the base64 form of git's credentials. Secrets
/// are sent without the blanks around them, so they are searched without.
#[must_use]
pub fn redact(text: &str, secrets: &[&Secret<String>]) -> String {
    let mut clean = text.to_owned();
    let values = secrets.iter().map(|secret| secret.expose().trim());
    for secret in values.filter(|secret| !secret.is_empty()) {
        clean = clean.replace(secret, "***");
        clean = clean.replace(&basic_credentials(secret), "***");
    }
    clean
}

/// The text after `Basic ` in the `authorization` header for a git forge.
pub(crate) fn basic_credentials(token: &str) -> String {
    BASE64_STANDARD.encode(format!("x-access-token:{token}"))
}

// A name contains no space, so different owners and names never have the same label.
fn label(owner: &SecretOwner, name: &SecretName) -> String {
    format!("harvest secret {owner} {name}")
}

fn read_key(path: &Path) -> Result<[u8; KEY_BYTES], VaultError> {
    let shown = path.display().to_string();
    let failed = |source| VaultError::KeyFile { doing: "read", path: shown.clone(), source };
    let file = fs::File::open(path).map_err(failed)?;
    if file.metadata().map_err(failed)?.mode() & 0o077 != 0 {
        return Err(VaultError::InvalidKey {
            path: shown,
            problem: "is readable by others; run `chmod 600` on it",
        });
    }
    let mut bytes = Vec::with_capacity(KEY_BYTES + 1);
    let limit = KEY_BYTES as u64 + 1;
    file.take(limit).read_to_end(&mut bytes).map_err(failed)?;
    bytes.try_into().map_err(|_| VaultError::InvalidKey {
        path: shown,
        problem: "does not contain 32 bytes; restore it from a backup",
    })
}

// The file appears complete or not at all, and a concurrent process uses the first one's key: a
// hard link fails when the name exists, where a rename would replace it.
fn create_key(path: &Path, random: &SystemRandom) -> Result<(), VaultError> {
    let failed = |doing| {
        move |source| VaultError::KeyFile { doing, path: path.display().to_string(), source }
    };
    let mut bytes = [0; KEY_BYTES + 8];
    random.fill(&mut bytes).map_err(|_| VaultError::Random)?;
    let (key, tag) = bytes.split_at(KEY_BYTES);
    let folder =
        path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let tag: String = tag.iter().map(|byte| format!("{byte:02x}")).collect();
    let draft = folder.join(format!(".key-{tag}"));
    let written = write_draft(&draft, key).and_then(|()| match fs::hard_link(&draft, path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    });
    let removed = fs::remove_file(&draft);
    written.map_err(failed("create"))?;
    removed.map_err(failed("remove the draft of"))?;
    fs::File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed("sync"))
}

fn write_draft(draft: &Path, key: &[u8]) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(draft)?;
    file.write_all(key)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use proptest::prelude::*;

    use super::*;

    const GLOBAL: SecretOwner = SecretOwner::Global;

    fn name(text: &str) -> SecretName {
        text.parse().unwrap()
    }

    #[test]
    fn secret_opens_only_with_owner_name_and_key() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let (value, owner) = (Secret::new("sk-ant-123".to_owned()), SecretOwner::user("a@b.org"));
        let sealed = Vault::open(&path).unwrap().seal(&owner, &name("A"), &value).unwrap();
        let vault = Vault::open(&path).unwrap();
        assert_eq!(vault.unseal(&owner, &name("A"), &sealed).unwrap(), value);
        assert!(vault.unseal(&owner, &name("B"), &sealed).is_err());
        assert!(vault.unseal(&SecretOwner::Global, &name("A"), &sealed).is_err());
        let other = Vault::open(&folder.path().join("other")).unwrap();
        assert!(other.unseal(&owner, &name("A"), &sealed).is_err());
        assert!(!sealed.windows(6).any(|part| part == b"sk-ant"));
    }

    #[test]
    fn key_file_is_private_without_leftover_draft() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        Vault::open(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(matches!(Vault::open(&path), Err(VaultError::InvalidKey { .. })));
    }

    #[test]
    fn concurrent_creation_yields_one_key() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let sealed: Vec<_> = std::thread::scope(|scope| {
            let make = || {
                Vault::open(&path)
                    .unwrap()
                    .seal(&GLOBAL, &name("A"), &Secret::new("v".into()))
                    .unwrap()
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(make)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let vault = Vault::open(&path).unwrap();
        assert!(sealed.iter().all(|sealed| vault.unseal(&GLOBAL, &name("A"), sealed).is_ok()));
    }

    #[test]
    fn fingerprint_needs_the_key() {
        let folder = tempfile::tempdir().unwrap();
        let vault = |name: &str| Vault::open(&folder.path().join(name)).unwrap();
        assert_eq!(vault("a").fingerprint(b"x"), vault("a").fingerprint(b"x"));
        assert_ne!(vault("a").fingerprint(b"x"), vault("a").fingerprint(b"y"));
        assert_ne!(vault("a").fingerprint(b"x"), vault("b").fingerprint(b"x"));
    }

    #[test]
    fn short_key_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        write_draft(&path, b"short").unwrap();
        assert!(matches!(Vault::open(&path), Err(VaultError::InvalidKey { .. })));
    }

    #[test]
    fn secret_name_is_capitals_digits_underscores() {
        assert!("ANTHROPIC_API_KEY".parse::<SecretName>().is_ok());
        for bad in ["", "a", "1A", "_A", "A-B", "A B", "Ä", &"A".repeat(129)] {
            assert!(bad.parse::<SecretName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn padded_secret_is_masked_everywhere() {
        let padded = Secret::new(" tok-1234567\n".to_owned());
        let text = format!("bad tok-1234567, Basic {}", basic_credentials("tok-1234567"));
        assert_eq!(redact(&text, &[&padded]), "bad ***, Basic ***");
        assert_eq!(redact("a b", &[&Secret::new(" ".to_owned())]), "a b");
    }

    #[test]
    fn token_is_redacted_plain_and_in_base64() {
        let token = Secret::new("ghp_abc".to_owned());
        let text = format!("bad ghp_abc, Basic {}", basic_credentials("ghp_abc"));
        assert_eq!(redact(&text, &[&token, &Secret::new(String::new())]), "bad ***, Basic ***");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn damaged_value_never_opens(
            value in ".{0,40}",
            at in any::<prop::sample::Index>(),
            bit in 0u8..8,
        ) {
            let folder = tempfile::tempdir().unwrap();
            let vault = Vault::open(&folder.path().join("key")).unwrap();
            let mut sealed = vault.seal(&GLOBAL, &name("A"), &Secret::new(value)).unwrap();
            let index = at.index(sealed.len());
            sealed[index] ^= 1 << bit;
            prop_assert!(vault.unseal(&GLOBAL, &name("A"), &sealed).is_err());
            prop_assert!(vault.unseal(&GLOBAL, &name("A"), &sealed[..index]).is_err());
        }
    }
}
