//! The values of a session's secrets, for masking. Read when they are first used, and again after a
//! secret was stored.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
};

use harvest_gateway::ledger::SecretsUnavailable;
use harvest_proto::{EventBody, SecretOwner};
use harvest_store::{NewPrompt, SessionRecord, Write};

use crate::{context::Shared, repositories::owners_of, secret_mask::SecretMask, wall_clock::now};

pub(super) struct SessionSecrets {
    owners: Vec<SecretOwner>,
    /// The values, and the vault's revision before they were read.
    known: Mutex<Option<(u64, Arc<SecretMask>)>>,
}

impl SessionSecrets {
    pub(super) fn of(record: &SessionRecord) -> Arc<Self> {
        Arc::new(Self { owners: owners_of(record), known: Mutex::default() })
    }

    pub(super) async fn values(
        &self,
        shared: &Shared,
    ) -> Result<Arc<SecretMask>, SecretsUnavailable> {
        let revision = shared.vault.revision();
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((_, values)) = known.filter(|(of, _)| *of == revision) {
            return Ok(values);
        }
        let secrets = shared.sandboxes.doors.secret_values(&self.owners).await?;
        let values = Arc::new(SecretMask::new(secrets));
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) =
            Some((revision, Arc::clone(&values)));
        Ok(values)
    }
}

/// Masks the values of secrets in a prompt before it is stored. Returns the warning that names the
/// secrets, if there were any.
pub(crate) fn mask_prompt(prompt: &mut NewPrompt, values: &SecretMask) -> Option<Write> {
    let (text, found) = values.mask_naming(prompt.text.to_string());
    if found.is_empty() {
        return None;
    }
    prompt.text = text.parse().expect("a mask has as many characters as what it replaces");
    let body = Box::new(EventBody::Warning { message: warning(&found) });
    Some(Write::Event { at: now(), turn: None, body })
}

fn warning(found: &BTreeSet<&str>) -> String {
    let (noun, names) = match found.len() {
        1 => ("secret", "its value"),
        _ => ("secrets", "their values"),
    };
    let list = found.iter().copied().collect::<Vec<_>>().join(", ");
    format!(
        "the prompt contained the {noun} {list}: {names} was masked, because no sandbox gets it; the \
         gateway adds the {noun} to requests (`harvest secret set NAME --host HOST`)"
    )
}

#[cfg(test)]
mod tests {
    use harvest_gateway::ledger::NamedSecret;
    use harvest_proto::{PromptId, Secret, bridge::Author};

    use super::*;

    #[test]
    fn longest_prompt_can_be_masked() {
        let value = "\u{e9}".repeat(8);
        let text = format!("{value}{}", "x".repeat(64_000 - 8));
        let mut prompt = NewPrompt {
            id: PromptId::random(),
            text: text.parse().unwrap(),
            author: Author::unknown(),
            agent: None,
            model: None,
            effort: None,
            attachments: Vec::new(),
            at: now(),
        };
        let key = NamedSecret { name: "KEY".to_owned(), value: Secret::new(value) };
        let warning = mask_prompt(&mut prompt, &SecretMask::new([key]));
        assert!(matches!(warning, Some(Write::Event { .. })));
        assert!(prompt.text.starts_with("********x"));
    }
}
