//! Apps and their installation tokens. An App is one file with its public key; a token is one file
//! named by its hash, so that the value is nowhere on the disk. The App's id is also the id of its
//! only installation.

use std::{fs, io, path::PathBuf, time::Duration};

use base64::{
    Engine,
    prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD},
};
use harvest_proto::{Secret, Timestamp};
use ring::rand::{SecureRandom, SystemRandom};
use serde::{Deserialize, Serialize};

use super::{
    ForgeError, LocalForge,
    permissions::Permissions,
    storage::{file_error, hash, read_json, write_json},
};
use crate::pem;

// As on GitHub.
const TOKEN_VALIDITY: Duration = Duration::from_secs(3600);
// GitHub's prefix of installation tokens, so that clients and redaction recognise them.
const TOKEN_PREFIX: &str = "ghs_";

/// An App to register.
#[derive(Debug, Clone)]
pub struct NewApp {
    pub name: String,
    /// PEM of the App's RSA key, public or private. Only the public half is stored.
    pub key: Secret<String>,
    pub permissions: Permissions,
    /// The repositories of the installation; `None` for all.
    pub repositories: Option<Vec<String>>,
}

/// An App of the local forge with its installation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct App {
    /// Also the id of the installation.
    pub id: u64,
    pub name: String,
    /// Base64 of the DER of a PKCS#1 public key.
    public_key: String,
    pub permissions: Permissions,
    pub repositories: Option<Vec<String>>,
    pub created_at: Timestamp,
    pub suspended_at: Option<Timestamp>,
}

impl App {
    /// The name in URLs and, followed by `[bot]`, as an author.
    #[must_use]
    pub fn slug(&self) -> String {
        crate::slug(&self.name)
    }

    pub(super) fn key(&self) -> Vec<u8> {
        // A damaged record yields a key that verifies nothing.
        BASE64_STANDARD.decode(&self.public_key).unwrap_or_default()
    }

    pub(super) fn has_repository(&self, name: &str) -> bool {
        self.repositories.as_ref().is_none_or(|all| all.iter().any(|one| one == name))
    }
}

/// The record of an installation token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct InstallationToken {
    pub(super) app: u64,
    pub(super) repositories: Option<Vec<String>>,
    pub(super) permissions: Permissions,
    pub(super) expires_at: Timestamp,
}

impl InstallationToken {
    pub(super) fn has_repository(&self, name: &str) -> bool {
        self.repositories.as_ref().is_none_or(|all| all.iter().any(|one| one == name))
    }
}

impl LocalForge {
    /// Registers an App and installs it.
    ///
    /// # Errors
    /// When the key is no RSA key, a repository does not exist, or the disk fails.
    pub async fn register_app(&self, new: NewApp) -> Result<App, ForgeError> {
        let key = pem::public_key(new.key.expose())?;
        for name in new.repositories.iter().flatten() {
            self.existing_folder(name)?;
        }
        let _guard = self.shared.writing.lock().await;
        let app = App {
            id: self.next_id()?,
            name: new.name,
            public_key: BASE64_STANDARD.encode(key),
            permissions: new.permissions,
            repositories: new.repositories,
            created_at: self.shared.clock.now(),
            suspended_at: None,
        };
        self.write_app(&app)?;
        Ok(app)
    }

    /// Suspends the App's installation, or ends the suspension. Tokens of a suspended installation
    /// are refused.
    ///
    /// # Errors
    /// When there is no such App, or the disk fails.
    pub async fn suspend_app(&self, id: u64, suspended: bool) -> Result<App, ForgeError> {
        let _guard = self.shared.writing.lock().await;
        let mut app = self.app(id)?.ok_or(ForgeError::NoApp { id })?;
        app.suspended_at = suspended.then(|| self.shared.clock.now());
        self.write_app(&app)?;
        Ok(app)
    }

    pub(super) fn app(&self, id: u64) -> Result<Option<App>, ForgeError> {
        read_json(&self.app_path(id))
    }

    /// Creates an installation token with these rights.
    pub(super) fn create_token(
        &self,
        app: &App,
        repositories: Option<Vec<String>>,
        permissions: Permissions,
    ) -> Result<(Secret<String>, InstallationToken), ForgeError> {
        let mut random = [0; 27];
        SystemRandom::new().fill(&mut random).map_err(|_| ForgeError::NoRandomness)?;
        let value = format!("{TOKEN_PREFIX}{}", BASE64_URL_SAFE_NO_PAD.encode(random));
        let now = self.shared.clock.now();
        let expires_at = now.after(TOKEN_VALIDITY);
        let token = InstallationToken { app: app.id, repositories, permissions, expires_at };
        self.remove_expired_tokens(now);
        write_json(&self.token_path(&value), &token)?;
        Ok((Secret::new(value), token))
    }

    /// The rights of a valid installation token: known, not expired, not suspended.
    pub(super) fn installation_token(
        &self,
        value: &str,
    ) -> Result<Option<(App, InstallationToken)>, ForgeError> {
        if !value.starts_with(TOKEN_PREFIX) {
            return Ok(None);
        }
        let Some(token) = read_json::<InstallationToken>(&self.token_path(value))? else {
            return Ok(None);
        };
        let app = self.app(token.app)?;
        let valid = token.expires_at > self.shared.clock.now();
        Ok(app.filter(|app| valid && app.suspended_at.is_none()).map(|app| (app, token)))
    }

    pub(super) fn revoke_token(&self, value: &str) -> Result<(), ForgeError> {
        let path = self.token_path(value);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(file_error("remove", &path)(error))
            }
            _ => Ok(()),
        }
    }

    fn remove_expired_tokens(&self, now: Timestamp) {
        let Ok(entries) = fs::read_dir(self.tokens()) else { return };
        for path in entries.filter_map(Result::ok).map(|entry| entry.path()) {
            let expired = match read_json::<InstallationToken>(&path) {
                Ok(Some(token)) => token.expires_at <= now,
                _ => false,
            };
            if expired {
                // The next token removes what is left.
                let _ = fs::remove_file(&path);
            }
        }
    }

    /// The next number of an App, a comment, a status or a webhook; the caller holds the writing
    /// lock. Numbers are never used twice, not even after a crash.
    pub(super) fn next_id(&self) -> Result<u64, ForgeError> {
        let path = self.shared.root.join(".next-id");
        let id = read_json::<u64>(&path)?.unwrap_or(1);
        write_json(&path, &(id + 1))?;
        Ok(id)
    }

    fn write_app(&self, app: &App) -> Result<(), ForgeError> {
        write_json(&self.app_path(app.id), app)
    }

    fn app_path(&self, id: u64) -> PathBuf {
        self.shared.root.join(".apps").join(format!("{id}.json"))
    }

    fn tokens(&self) -> PathBuf {
        self.shared.root.join(".tokens")
    }

    fn token_path(&self, value: &str) -> PathBuf {
        self.tokens().join(format!("{}.json", hash(value)))
    }
}
