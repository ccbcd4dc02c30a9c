//! Secrets at rest, and keeping them out of text. Knows nothing about who may use which.
//!
//! A sealed secret is one version byte, a nonce of 12 random bytes, and the value under AES-256-GCM
//! with the secret's name as associated data, so that a sealed value cannot be moved to another name.

use std::{
    fmt, fs,
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::Path,
    str::FromStr,
};

use base64::{Engine, prelude::BASE64_STANDARD};
use harvest_proto::Secret;
use ring::{
    aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey},
    rand::{SecureRandom, SystemRandom},
};

const VERSION: u8 = 1;
const KEY_BYTES: usize = 32;

/// Why a secret cannot be kept or read.
#[derive(Debug, thiserror::Error)]
pub enum VaultError {
    /// The key file could not be read or made.
    #[error("cannot {doing} the key file `{path}`")]
    KeyFile {
        /// What was tried.
        doing: &'static str,
        /// Which file.
        path: String,
        /// Why not.
        source: io::Error,
    },
    /// Others may read the key, or it is not a key.
    #[error("the key file `{path}` {problem}")]
    KeyUnsound {
        /// Which file.
        path: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The sealed bytes are damaged, belong to another name or were sealed with another key.
    #[error("the stored value of secret `{name}` does not open with this key")]
    Unopenable {
        /// Whose.
        name: SecretName,
    },
    /// The kernel gave no random bytes.
    #[error("the system's random source failed")]
    Random,
}

/// A secret's name: a capital letter, then up to 127 capitals, digits and underscores.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SecretName(String);

/// Why a text is not a secret's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "a secret's name is a capital letter followed by at most 127 capitals, digits and underscores"
)]
pub struct SecretNameError;

impl SecretName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for SecretName {
    type Err = SecretNameError;

    fn from_str(text: &str) -> Result<Self, SecretNameError> {
        let sound = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_';
        let begins = text.as_bytes().first().is_some_and(u8::is_ascii_uppercase);
        (begins && text.len() <= 128 && text.bytes().all(sound))
            .then(|| Self(text.to_owned()))
            .ok_or(SecretNameError)
    }
}

impl fmt::Display for SecretName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

/// Seals and unseals secrets with one key, kept in a file only its owner can read.
pub struct Vault {
    key: LessSafeKey,
    random: SystemRandom,
    tell: fn(&Secret<String>),
}

impl fmt::Debug for Vault {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Vault(***)")
    }
}

impl Vault {
    /// Calls `tell` with every value that passes, sealed or unsealed: whoever keeps a log wants to know
    /// what must not be in it.
    #[must_use]
    pub fn telling(self, tell: fn(&Secret<String>)) -> Self {
        Self { tell, ..self }
    }

    /// Opens the vault whose key is in this file; makes the file when there is none.
    ///
    /// # Errors
    /// When the file cannot be read or made, is readable by others, or is not a key.
    pub fn open(path: &Path) -> Result<Self, VaultError> {
        let random = SystemRandom::new();
        let bytes = match read_key(path) {
            Err(VaultError::KeyFile { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                make_key(path, &random)?;
                read_key(path)?
            }
            other => other?,
        };
        let key = UnboundKey::new(&AES_256_GCM, &bytes).expect("32 bytes are a key of AES-256");
        Ok(Self { key: LessSafeKey::new(key), random, tell: |_| {} })
    }

    /// The value as it may be stored.
    ///
    /// # Errors
    /// When the system has no random bytes for us.
    pub fn seal(&self, name: &SecretName, value: &Secret<String>) -> Result<Vec<u8>, VaultError> {
        (self.tell)(value);
        let mut nonce = [0; NONCE_LEN];
        self.random.fill(&mut nonce).map_err(|_| VaultError::Random)?;
        let mut body = value.expose().clone().into_bytes();
        self.key
            .seal_in_place_append_tag(
                Nonce::assume_unique_for_key(nonce),
                associated(name),
                &mut body,
            )
            .expect("a secret is shorter than the 64 GiB one nonce may cover");
        Ok([&[VERSION], &nonce[..], &body].concat())
    }

    /// The value itself.
    ///
    /// # Errors
    /// When the bytes were not sealed under this name with this key.
    pub fn unseal(&self, name: &SecretName, sealed: &[u8]) -> Result<Secret<String>, VaultError> {
        self.unseal_bytes(name, sealed)
            .and_then(|bytes| String::from_utf8(bytes).ok())
            .map(Secret::new)
            .inspect(self.tell)
            .ok_or_else(|| VaultError::Unopenable { name: name.clone() })
    }

    fn unseal_bytes(&self, name: &SecretName, sealed: &[u8]) -> Option<Vec<u8>> {
        let (nonce, body) = sealed.strip_prefix(&[VERSION])?.split_first_chunk::<NONCE_LEN>()?;
        let mut body = body.to_vec();
        let nonce = Nonce::assume_unique_for_key(*nonce);
        let length = self.key.open_in_place(nonce, associated(name), &mut body).ok()?.len();
        body.truncate(length);
        Some(body)
    }
}

/// The text with every secret in it replaced by `***`, also where it stands in base64 as git's
/// credentials do.
#[must_use]
pub fn redact(text: &str, secrets: &[&Secret<String>]) -> String {
    let mut clean = text.to_owned();
    for secret in secrets.iter().map(|secret| secret.expose()).filter(|secret| !secret.is_empty()) {
        clean = clean.replace(secret.as_str(), "***");
        clean = clean.replace(&basic_credentials(secret), "***");
    }
    clean
}

/// What follows `Basic ` when a token is sent to a git forge.
pub(crate) fn basic_credentials(token: &str) -> String {
    BASE64_STANDARD.encode(format!("x-access-token:{token}"))
}

fn associated(name: &SecretName) -> Aad<Vec<u8>> {
    Aad::from(format!("harvest secret {name}").into_bytes())
}

fn read_key(path: &Path) -> Result<[u8; KEY_BYTES], VaultError> {
    let shown = path.display().to_string();
    let failed = |source| VaultError::KeyFile { doing: "read", path: shown.clone(), source };
    let file = fs::File::open(path).map_err(failed)?;
    if file.metadata().map_err(failed)?.mode() & 0o077 != 0 {
        return Err(VaultError::KeyUnsound {
            path: shown,
            problem: "can be read by others; chmod it to 0600",
        });
    }
    let mut bytes = Vec::with_capacity(KEY_BYTES + 1);
    let limit = KEY_BYTES as u64 + 1;
    file.take(limit).read_to_end(&mut bytes).map_err(failed)?;
    bytes
        .try_into()
        .map_err(|_| VaultError::KeyUnsound { path: shown, problem: "does not hold 32 bytes" })
}

// The file appears under its name complete or not at all, and whoever comes second uses the first
// one's key: a link fails when the name is taken, where a rename would replace it.
fn make_key(path: &Path, random: &SystemRandom) -> Result<(), VaultError> {
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
    written.map_err(failed("make"))?;
    removed.map_err(failed("tidy up after making"))?;
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

    fn name(text: &str) -> SecretName {
        text.parse().unwrap()
    }

    #[test]
    fn a_secret_survives_reopening_the_vault_and_opens_under_its_own_name_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let value = Secret::new("sk-ant-123".to_owned());
        let sealed = Vault::open(&path).unwrap().seal(&name("A"), &value).unwrap();
        let vault = Vault::open(&path).unwrap();
        assert_eq!(vault.unseal(&name("A"), &sealed).unwrap(), value);
        assert!(vault.unseal(&name("B"), &sealed).is_err());
        let other = Vault::open(&folder.path().join("other")).unwrap();
        assert!(other.unseal(&name("A"), &sealed).is_err());
        assert!(!sealed.windows(6).any(|part| part == b"sk-ant"));
    }

    #[test]
    fn the_key_file_is_private_and_leaves_no_draft_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        Vault::open(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(matches!(Vault::open(&path), Err(VaultError::KeyUnsound { .. })));
    }

    #[test]
    fn many_who_make_the_key_at_once_end_up_with_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let sealed: Vec<_> = std::thread::scope(|scope| {
            let make =
                || Vault::open(&path).unwrap().seal(&name("A"), &Secret::new("v".into())).unwrap();
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(make)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let vault = Vault::open(&path).unwrap();
        assert!(sealed.iter().all(|sealed| vault.unseal(&name("A"), sealed).is_ok()));
    }

    #[test]
    fn a_short_key_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        write_draft(&path, b"short").unwrap();
        assert!(matches!(Vault::open(&path), Err(VaultError::KeyUnsound { .. })));
    }

    #[test]
    fn a_name_is_capitals_digits_and_underscores() {
        assert!("ANTHROPIC_API_KEY".parse::<SecretName>().is_ok());
        for bad in ["", "a", "1A", "_A", "A-B", "A B", "Ä", &"A".repeat(129)] {
            assert!(bad.parse::<SecretName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn redacting_hides_a_token_plain_and_as_git_sends_it() {
        let token = Secret::new("ghp_abc".to_owned());
        let text = format!("bad ghp_abc, Basic {}", basic_credentials("ghp_abc"));
        assert_eq!(redact(&text, &[&token, &Secret::new(String::new())]), "bad ***, Basic ***");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn damaged_bytes_never_open(value in ".{0,40}", at in any::<prop::sample::Index>(), bit in 0u8..8) {
            let folder = tempfile::tempdir().unwrap();
            let vault = Vault::open(&folder.path().join("key")).unwrap();
            let mut sealed = vault.seal(&name("A"), &Secret::new(value)).unwrap();
            let index = at.index(sealed.len());
            sealed[index] ^= 1 << bit;
            prop_assert!(vault.unseal(&name("A"), &sealed).is_err());
            prop_assert!(vault.unseal(&name("A"), &sealed[..index]).is_err());
        }
    }
}
