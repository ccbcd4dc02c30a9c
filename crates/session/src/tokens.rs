//! Tokens: made, recognised, revoked. Of a token's value only a hash is kept. What a token's user may do
//! is the server's to judge.

use std::time::Duration;

use harvest_proto::{
    Secret,
    api::{Role, Token},
    bridge::Author,
};
use ring::digest::{SHA256, digest};

use crate::{Sessions, error::SessionError, secrets::hex, wiring::now};

/// How stale `last_used` may get: a write for every request would be too much for what it tells.
const USED_WITHIN: Duration = Duration::from_secs(600);

impl Sessions {
    /// Makes a token. Its value is shown this once.
    ///
    /// # Errors
    /// When one has this name, or the name makes no sense.
    pub async fn token_create(
        &self,
        name: &str,
        user: Author,
        role: Role,
    ) -> Result<(Token, Secret<String>), SessionError> {
        let (token, value) = new(name, user, role)?;
        self.shared.store.token_insert(&hash(value.expose()), &token).await?;
        Ok((token, value))
    }

    /// Makes a token in place of one of that name whose value is lost.
    ///
    /// # Errors
    /// When the name makes no sense.
    pub async fn token_replace(
        &self,
        name: &str,
        user: Author,
        role: Role,
    ) -> Result<Secret<String>, SessionError> {
        let (token, value) = new(name, user, role)?;
        self.shared.store.token_replace(&hash(value.expose()), &token).await?;
        Ok(value)
    }

    /// The token with this value, if it is one of ours.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn token_check(&self, value: &str) -> Result<Option<Token>, SessionError> {
        let found = self.shared.store.token_find(&hash(value)).await?;
        if let Some(token) = &found {
            self.note_use(token);
        }
        Ok(found)
    }

    /// Nobody waits for it, and a full disk must not keep anyone out.
    fn note_use(&self, token: &Token) {
        let at = now();
        if token.last_used.is_some_and(|last| at.since(last) < USED_WITHIN) {
            return;
        }
        let (store, name) = (self.shared.store.clone(), token.name.clone());
        self.shared.spawn(async move {
            if let Err(error) = store.token_used(&name, at).await {
                tracing::debug!(name, %error, "the use of a token was not noted");
            }
        });
    }

    /// A token.
    ///
    /// # Errors
    /// When there is none of this name.
    pub async fn token_get(&self, name: &str) -> Result<Token, SessionError> {
        Ok(self.shared.store.token_get(name).await?)
    }

    /// All tokens, by name.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn token_list(&self) -> Result<Vec<Token>, SessionError> {
        Ok(self.shared.store.token_list().await?)
    }

    /// Forgets a token; who shows it from now on is a stranger.
    ///
    /// # Errors
    /// When there is none of this name, or nobody could administer the server without it.
    pub async fn token_delete(&self, name: &str) -> Result<(), SessionError> {
        if self.shared.store.token_remove(name).await? {
            return Ok(());
        }
        self.shared.store.token_get(name).await?;
        Err(SessionError::conflict(
            "last_admin",
            format!("`{name}` is the only token of an admin"),
            "make another one first: `harvest token create NAME --role admin`",
        ))
    }
}

fn new(name: &str, user: Author, role: Role) -> Result<(Token, Secret<String>), SessionError> {
    if !is_name(name) {
        let what = "a token's name is 1 to 64 letters, digits, `.`, `_` and `-`, the first a letter or digit";
        return Err(SessionError::invalid("invalid_name", what));
    }
    let mut bytes = [0u8; 20];
    getrandom::fill(&mut bytes)
        .expect("the kernel's random source is there on every Linux we support");
    let token = Token { name: name.to_owned(), user, role, created_at: now(), last_used: None };
    Ok((token, Secret::new(format!("hvt_{}", hex(&bytes)))))
}

fn is_name(text: &str) -> bool {
    let sound = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    text.as_bytes().first().is_some_and(u8::is_ascii_alphanumeric)
        && text.len() <= 64
        && text.bytes().all(sound)
}

fn hash(value: &str) -> String {
    hex(digest(&SHA256, value.as_bytes()).as_ref())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tokens_name_can_be_part_of_a_path() {
        for good in ["laptop", "ci-2.main_x", "7"] {
            assert!(is_name(good), "{good}");
        }
        for bad in ["", ".", "-x", "a/b", "a b", "ä", &"x".repeat(65)] {
            assert!(!is_name(bad), "{bad}");
        }
    }
}
