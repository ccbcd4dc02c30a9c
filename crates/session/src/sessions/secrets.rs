//! Secrets of a session: stored in the transaction that creates it, and deleted with it.

use std::collections::BTreeMap;

use harvest_gateway::ledger::NamedSecret;
use harvest_proto::{Secret, SecretOwner, SessionId, bridge::Author};
use harvest_store::{SealedSecret, SessionRecord, Write};

use super::Sessions;
use crate::{accounts::seal, error::SessionError, secret_mask::SecretMask};

const MAX_SECRETS: usize = 100;
const MAX_SECRET_BYTES: usize = 64 * 1024;

/// A secret of one session that another gets too.
pub(super) struct InheritedSecret {
    stored: SealedSecret,
    value: Secret<String>,
}

impl Sessions {
    /// The writes that give a new session its secrets.
    pub(super) fn secret_writes(
        &self,
        session: &SessionId,
        secrets: &BTreeMap<String, Secret<String>>,
    ) -> Result<Vec<Write>, SessionError> {
        let invalid = |what: String| Err(SessionError::invalid("invalid_secret", what));
        if let Some((name, _)) = secrets.iter().find(|(_, value)| value.expose().is_empty()) {
            return invalid(format!("the secret `{name}` is empty"));
        }
        let bytes: usize = secrets.values().map(|value| value.expose().len()).sum();
        if secrets.len() > MAX_SECRETS || bytes > MAX_SECRET_BYTES {
            return invalid(format!(
                "at most {MAX_SECRETS} secrets and {MAX_SECRET_BYTES} bytes in total per session"
            ));
        }
        let owner = SecretOwner::Session(session.clone());
        let write = |(name, value): (&String, &Secret<String>)| {
            let sealed = seal(&self.shared.vault, &owner, name, value)?;
            Ok(Write::Secret(Box::new(sealed)))
        };
        secrets.iter().map(write).collect()
    }

    /// Masks the values of the secrets of these owners, and of some that are not stored yet.
    pub(super) async fn secret_mask(
        &self,
        owners: &[SecretOwner],
        given: impl Iterator<Item = NamedSecret>,
    ) -> Result<SecretMask, SessionError> {
        let stored = self.shared.sandboxes.doors.secret_values(owners).await?;
        Ok(SecretMask::new(stored.into_iter().chain(given)))
    }

    /// The session's own secrets, if a session of `user` may have them too: one of another author
    /// may not.
    pub(super) async fn secrets_for(
        &self,
        source: &SessionRecord,
        user: &Author,
    ) -> Result<Vec<InheritedSecret>, SessionError> {
        let author = &source.session.author;
        if !author.email.eq_ignore_ascii_case(&user.email) {
            return Ok(Vec::new());
        }
        let owner = SecretOwner::Session(source.session.id.clone());
        let stored = self.shared.store.secrets_of(std::slice::from_ref(&owner)).await?;
        let open = |stored: SealedSecret| {
            // The store has only names that were checked.
            let name = stored.name.parse().ok()?;
            let value = self.shared.vault.unseal(&owner, &name, &stored.sealed).ok()?;
            Some(InheritedSecret { stored, value })
        };
        Ok(stored.into_iter().filter_map(open).collect())
    }

    /// The writes that give a new session the secrets of another.
    pub(super) fn inherited_writes(
        &self,
        session: &SessionId,
        inherited: &[InheritedSecret],
    ) -> Result<Vec<Write>, SessionError> {
        let owner = SecretOwner::Session(session.clone());
        let write = |InheritedSecret { stored, value }: &InheritedSecret| {
            let sealed = seal(&self.shared.vault, &owner, &stored.name, value)?;
            let binding = stored.binding.clone();
            Ok(Write::Secret(Box::new(SealedSecret { binding, ..sealed })))
        };
        inherited.iter().map(write).collect()
    }
}
