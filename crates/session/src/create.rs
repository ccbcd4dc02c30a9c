//! What a session is made from: repositories, variables, a snapshot, a key. Everything a request says is
//! looked at before anything is made of it.

use std::collections::{BTreeMap, HashSet};

use harvest_proto::{
    EventBody, SessionId, SnapshotId,
    api::{AddRepository, CreateSession, Repository, Session, UseRepository},
    bridge::Author,
};
use harvest_store::{NewCheckout, NewSession, Removal, Write};

use crate::{
    Sessions,
    asks::{new_prompt, title},
    decide::State,
    error::SessionError,
    provider::StartFrom,
    repository::check_branch,
    sessions::{branch, named_agent, named_network, uuid},
    wiring::now,
};

// More than anybody lays side by side; each is a clone to wait for.
const MOST_REPOSITORIES: usize = 16;

// What one frame and one line of a list carry without anybody noticing.
const MOST_VARIABLES: usize = 100;
const MOST_VARIABLE_BYTES: usize = 64 * 1024;

const LONGEST_KEY: usize = 200;

impl Sessions {
    /// Creates a session. With a prompt it is on disk, session and prompt, when this answers.
    ///
    /// # Errors
    /// When a repository or the snapshot is not known, the key is taken, or the request makes no sense.
    pub async fn create(
        &self,
        create: CreateSession,
        user: Author,
    ) -> Result<Session, SessionError> {
        let whose = Some(user.email.clone());
        let author = create.author.unwrap_or(user);
        let (agent, network) = (named_agent(create.agent)?, named_network(create.network)?);
        let prompt = create.prompt.map(|text| new_prompt(text, author.clone())).transpose()?;
        check_env(&create.env)?;
        create.key.as_deref().map(check_key).transpose()?;
        let wanted = wanted(create.repository, create.base, create.repositories)?;
        if let Some(key) = &create.key {
            self.key_is_free(key).await?;
        }
        let began = match &create.from {
            Some(snapshot) => self.start_from(snapshot).await?,
            None => Vec::new(),
        };
        let checkouts = self.checkouts(wanted).await?;
        let title =
            prompt.as_ref().map_or_else(|| "untitled".to_owned(), |prompt| title(&prompt.text));
        let id = SessionId::random();
        let new = NewSession {
            branch: branch(&id, prompt.as_ref().map(|_| title.as_str())),
            id,
            title,
            checkouts,
            agent,
            model: create.model,
            network,
            author,
            conversation: uuid(),
            forked_from: None,
            forked_turn: None,
            key: create.key.clone(),
            env: create.env,
            at: now(),
        };
        let state = State { user: whose, ..State::new(create.from, false) };
        let inserted = self.insert(new, state, prompt, began).await;
        // Somebody else may have taken the key this moment: who has it now is what they want to hear.
        if let (Err(SessionError::Conflict { .. }), Some(key)) = (&inserted, &create.key) {
            self.key_is_free(key).await?;
        }
        inserted
    }

    async fn key_is_free(&self, key: &str) -> Result<(), SessionError> {
        match self.shared.store.session_by_key(key).await? {
            None => Ok(()),
            Some(session) => Err(SessionError::conflict(
                "key_taken",
                format!("session {session} has the key `{key}`"),
                "use that session, or another key",
            )),
        }
    }

    /// Whose sessions have a snapshot; nobody's when it was taken of no session.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn snapshot_authors(
        &self,
        snapshot: &SnapshotId,
    ) -> Result<Vec<Author>, SessionError> {
        Ok(self.shared.store.snapshot_authors(snapshot).await?)
    }

    /// What a session writes first that starts from a snapshot somebody took.
    async fn start_from(&self, snapshot: &SnapshotId) -> Result<Vec<Write>, SessionError> {
        let removed =
            self.shared.store.removal_list().await?.contains(&Removal::Snapshot(snapshot.clone()));
        if removed || !self.shared.provider.holds(&StartFrom::Snapshot(snapshot.clone())).await? {
            return Err(SessionError::missing(format!("snapshot {snapshot}")));
        }
        let (at, detail) = (now(), format!("start from {snapshot}"));
        let body = EventBody::Restored { snapshot: snapshot.clone(), detail };
        let mut writes = vec![Write::Event { at, turn: None, body: Box::new(body) }];
        // One that no session has is its owner's alone to remove: without a row it does not go with us.
        if !self.shared.store.snapshot_authors(snapshot).await?.is_empty() {
            writes.push(Write::SnapshotShare { snapshot: snapshot.clone(), at });
        }
        Ok(writes)
    }

    async fn checkouts(
        &self,
        wanted: Vec<UseRepository>,
    ) -> Result<Vec<NewCheckout>, SessionError> {
        let (mut checkouts, mut names) = (Vec::with_capacity(wanted.len()), HashSet::new());
        for one in wanted {
            let repository = self.repository_for(&one).await?;
            if !names.insert(repository.name.clone()) {
                return Err(invalid(format!("repository `{}` is named twice", repository.name)));
            }
            let base = one.base.or(repository.base);
            checkouts.push(NewCheckout { repository: repository.name, base, base_commit: None });
        }
        Ok(checkouts)
    }

    async fn repository_for(&self, wanted: &UseRepository) -> Result<Repository, SessionError> {
        let UseRepository { name: None, url: Some(url), .. } = wanted else {
            return self.repository(wanted.name.as_deref().unwrap_or_default()).await;
        };
        let url = url.trim().trim_end_matches('/');
        let url = &self.shared.pulls.current(url);
        if let Some(known) = self.repositories().await?.into_iter().find(|known| known.url == *url)
        {
            return Ok(known);
        }
        let add = AddRepository { url: url.to_owned(), ..AddRepository::default() };
        self.repository_add(add).await.map_err(|error| match error {
            SessionError::Conflict { code: "exists", what, .. } => SessionError::conflict(
                "exists",
                format!("{what}, and is not at {url}"),
                "register it under another name first: `harvest repo add URL --name NAME`",
            ),
            other => other,
        })
    }
}

fn invalid(what: impl Into<String>) -> SessionError {
    SessionError::invalid("invalid_repositories", what)
}

/// The one list of what is asked for, whichever way it was said.
fn wanted(
    repository: Option<String>,
    base: Option<String>,
    repositories: Vec<UseRepository>,
) -> Result<Vec<UseRepository>, SessionError> {
    let all = match (repository, base, repositories) {
        (Some(_), _, listed) if !listed.is_empty() => {
            return Err(invalid(
                "name the repositories in `repositories` or the one in `repository`, not both",
            ));
        }
        (None, Some(_), _) => {
            return Err(invalid(
                "`base` belongs to `repository`; in `repositories` each has its own",
            ));
        }
        (Some(one), base, _) if one.contains("://") => {
            vec![UseRepository { name: None, url: Some(one), base }]
        }
        (Some(one), base, _) => vec![UseRepository { name: Some(one), url: None, base }],
        (None, None, listed) => listed,
    };
    if all.len() > MOST_REPOSITORIES {
        return Err(invalid(format!("a session has at most {MOST_REPOSITORIES} repositories")));
    }
    for one in &all {
        if one.name.is_some() == one.url.is_some() {
            return Err(invalid("a repository is named by its `name` or by its `url`"));
        }
        if one.name.as_ref().is_some_and(|name| name.contains('\0')) {
            return Err(invalid("a repository's name has no zero byte in it"));
        }
        one.base.as_deref().map(check_branch).transpose()?;
    }
    Ok(all)
}

/// What every shell takes for a variable, and what the kernel can be given. Ours begin with `HARVEST_`.
fn check_env(env: &BTreeMap<String, String>) -> Result<(), SessionError> {
    let invalid = |what: String| Err(SessionError::invalid("invalid_env", what));
    let letter = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    for (name, value) in env {
        if name.is_empty()
            || name.len() > 200
            || name.as_bytes()[0].is_ascii_digit()
            || !name.bytes().all(letter)
        {
            let name: String = name.chars().take(100).collect();
            return invalid(format!("`{name}` is not a variable's name: letters, digits and `_`"));
        }
        if name.starts_with("HARVEST_") {
            return invalid(format!("`{name}` is Harvest's own: choose a name without `HARVEST_`"));
        }
        if value.contains('\0') {
            return invalid(format!("the value of `{name}` holds a zero byte"));
        }
    }
    let bytes: usize = env.iter().map(|(name, value)| name.len() + value.len()).sum();
    if env.len() > MOST_VARIABLES || bytes > MOST_VARIABLE_BYTES {
        return invalid(format!(
            "a session has at most {MOST_VARIABLES} variables and {MOST_VARIABLE_BYTES} bytes of them"
        ));
    }
    Ok(())
}

fn check_key(key: &str) -> Result<(), SessionError> {
    let sound =
        (1..=LONGEST_KEY).contains(&key.chars().count()) && !key.chars().any(char::is_control);
    match sound && key.trim() == key {
        true => Ok(()),
        false => Err(SessionError::invalid(
            "invalid_key",
            format!("a key is 1 to {LONGEST_KEY} characters on one line, without blanks around it"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> UseRepository {
        UseRepository { name: Some(name.into()), ..UseRepository::default() }
    }

    #[test]
    fn repositories_are_said_in_one_way_or_the_other() {
        let one = wanted(Some("app".into()), Some("next".into()), Vec::new()).unwrap();
        assert_eq!(one, [UseRepository { base: Some("next".into()), ..named("app") }]);
        let url = wanted(Some("https://h/app".into()), None, Vec::new()).unwrap();
        assert_eq!(url[0].url.as_deref(), Some("https://h/app"));
        assert_eq!(wanted(None, None, Vec::new()).unwrap(), []);
        assert!(wanted(Some("app".into()), None, vec![named("b")]).is_err());
        assert!(wanted(None, Some("next".into()), vec![named("b")]).is_err());
        let both = UseRepository { url: Some("https://h/app".into()), ..named("app") };
        assert!(wanted(None, None, vec![both]).is_err());
        assert!(wanted(None, None, vec![UseRepository::default()]).is_err());
        assert!(wanted(None, None, vec![named("a"); MOST_REPOSITORIES + 1]).is_err());
    }

    #[test]
    fn a_variable_is_one_a_shell_would_take_and_none_of_ours() {
        let check =
            |name: &str, value: &str| check_env(&[(name.to_owned(), value.to_owned())].into());
        assert!(check("NODE_ENV", "a=b\nc").is_ok() && check("_", "").is_ok());
        for bad in ["", "1A", "A B", "A=B", "Ä", "HARVEST_WORKSPACE", &"A".repeat(201)] {
            assert!(check(bad, "x").is_err(), "{bad}");
        }
        assert!(check("A", "\0").is_err() && check("A", &"x".repeat(MOST_VARIABLE_BYTES)).is_err());
    }

    #[test]
    fn a_key_is_one_line() {
        assert!(check_key("issue #12").is_ok());
        for bad in ["", " a", "a\n", &"k".repeat(201)] {
            assert!(check_key(bad).is_err(), "{bad:?}");
        }
    }
}
