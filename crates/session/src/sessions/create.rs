//! Creates sessions from repositories, environment variables, a snapshot and a key. The whole
//! request is validated before anything is created.

use std::collections::{BTreeMap, HashSet};

use harvest_gateway::ledger::NamedSecret;
use harvest_proto::{
    AgentName, BranchName, EventBody, Hint as _, InvalidPort, ModelRef, RuleTarget, RuleVerdict,
    Secret, SecretOwner, SessionId, SnapshotId, UpstreamName,
    api::{
        AddRepository, CreateSession, McpService, ModelService, NetworkRule, Repository,
        ServiceModels, Session, SetNetworkRule, UnusableModel, UseRepository,
    },
    bridge::Author,
    repository_address::{is_same_url, is_short, of_ssh},
    repository_name::InvalidRepositoryRef,
};
use harvest_store::{
    AgentChoice, NewCheckout, NewPrompt, NewSession, Removal, RuleOwner, SessionKey, Write,
};

use super::{Sessions, attachments, branch, verbs::new_prompt};
use crate::{
    decide::State,
    driver::{UNTITLED, mask_prompt, title},
    error::SessionError,
    pool::ClaimedMember,
    repositories::{default_network, network_rule, shared_owners},
    sandboxes::StartFrom,
    uuid::uuid,
    wall_clock::now,
};

// Each repository is a clone that delays the start.
const MAX_REPOSITORIES: usize = 16;

// Small enough to travel in one bridge frame.
const MAX_VARIABLES: usize = 100;
const MAX_VARIABLE_BYTES: usize = 64 * 1024;

const MAX_KEY_CHARS: usize = 200;

impl Sessions {
    /// Creates a session. Session and first prompt are durable when this returns.
    ///
    /// # Errors
    /// When a repository or the snapshot does not exist, the key is taken, or the request
    /// is invalid.
    pub async fn create(
        &self,
        create: CreateSession,
        user: Author,
    ) -> Result<Session, SessionError> {
        let planned =
            PlannedSession { id: SessionId::random(), writes: Vec::new(), secrets_of: None };
        self.create_with(create, user, planned).await
    }

    /// Like [`Sessions::create`], for a session with this id and further writes.
    pub(super) async fn create_with(
        &self,
        create: CreateSession,
        user: Author,
        planned: PlannedSession,
    ) -> Result<Session, SessionError> {
        let PlannedSession { mut id, writes, secrets_of } = planned;
        let owner = user.email.clone();
        let author = create.author.unwrap_or(user);
        let attachments = attachments::check(create.attachments)?;
        if create.prompt.is_none() && !attachments.is_empty() {
            let what = "`attachments` need a `prompt`";
            return Err(SessionError::invalid("invalid_attachment", what));
        }
        let prompt = create.prompt.map(|text| new_prompt(text, author.clone()));
        let mut prompt = prompt.map(|prompt| NewPrompt { attachments, ..prompt });
        check_env(&create.env)?;
        create.key.as_deref().map(check_key).transpose()?;
        let key = create.key.map(|text| SessionKey { owner: owner.clone(), text });
        let agent = create.agent.unwrap_or_default();
        let wanted = requested_repositories(create.repository, create.base, create.repositories)?;
        // The id of a session that an agent creates is in its further writes already. The agent of
        // a waiting sandbox has started without variables and secrets of the session.
        let is_plain = secrets_of.is_none()
            && create.from.is_none()
            && create.env.is_empty()
            && create.secrets.is_empty();
        let owners = self.owners_of_new(&wanted, &author, secrets_of).await?;
        let services = self.services_of_new(&owners, &create.secrets).await;
        let warning = self.mask_first_prompt(&mut prompt, &owners, &create.secrets).await?;
        check_model_key(&services, &agent, create.model.as_ref())?;
        if let Some(key) = &key {
            self.check_key_free(key).await?;
        }
        let mut own_writes = self.own_writes(&id, &create.secrets, &create.allow)?;
        let mut first_writes = match &create.from {
            Some(snapshot) => self.start_from(snapshot).await?,
            None => Vec::new(),
        };
        let known = self.first_repository(&wanted).await?;
        let declared = known.as_ref().and_then(|one| one.build.as_ref()?.config.as_ref());
        let budget = create.budget_micros.or(declared.and_then(|config| config.budget_micros));
        first_writes.extend(budget.map(|limit| Write::Budget(Some(limit))));
        let network = default_network(declared);
        let repositories = &self.shared.repositories;
        repositories.check_agent(&agent, known.as_ref(), create.from.as_ref()).await?;
        let checkouts = self.checkouts(wanted, &author).await?;
        let title =
            prompt.as_ref().map_or_else(|| UNTITLED.to_owned(), |prompt| title(&prompt.text));
        let choice = AgentChoice {
            agent,
            model: create.model,
            effort: create.effort,
            no_questions: create.no_questions,
        };
        let member = match known.filter(|_| is_plain) {
            Some(known) => self.take_member(&known, &checkouts, &choice, &author, &owner).await,
            None => None,
        };
        if let Some(member) = &member {
            id = member.session().clone();
            own_writes = self.own_writes(&id, &create.secrets, &create.allow)?;
            own_writes.extend(member.writes());
        }
        first_writes.extend(writes.into_iter().chain(own_writes));
        first_writes.extend(warning);
        // The agent of a waiting sandbox has looked at its branch before there was a title.
        let of_branch = prompt.as_ref().filter(|_| member.is_none()).map(|_| title.as_str());
        let AgentChoice { agent, model, effort, no_questions } = choice;
        let new = NewSession {
            branch: branch(&id, of_branch),
            id,
            title,
            checkouts,
            agent,
            model,
            effort,
            network: create.network.unwrap_or(network),
            provider: self.shared.sandboxes.provider.name().to_owned(),
            author,
            conversation: member.as_ref().map_or_else(uuid, ClaimedMember::conversation),
            forked_from: None,
            forked_turn: None,
            key: key.clone(),
            env: create.env,
            no_questions,
            pr_mode: create.pr_mode,
            at: now(),
        };
        let state = match &member {
            Some(member) => member.state(),
            None => State::new(create.from, false),
        };
        let state = State { user: Some(owner), ..state };
        let inserted = self.insert(new, state, prompt, first_writes).await;
        if inserted.is_ok() {
            member.into_iter().for_each(ClaimedMember::inserted);
            self.shared.pool.on_created();
        }
        // Another request may have taken the key meanwhile: report which session has it.
        if let (Err(SessionError::Conflict { .. }), Some(key)) = (&inserted, &key) {
            self.check_key_free(key).await?;
        }
        inserted
    }

    /// Masks the values of secrets in the first prompt; returns the warning that names them.
    async fn mask_first_prompt(
        &self,
        prompt: &mut Option<NewPrompt>,
        owners: &[SecretOwner],
        given: &BTreeMap<String, Secret<String>>,
    ) -> Result<Option<Write>, SessionError> {
        let Some(prompt) = prompt else { return Ok(None) };
        let named = |(name, value): (&String, &Secret<String>)| NamedSecret {
            name: name.clone(),
            value: value.clone(),
        };
        Ok(mask_prompt(prompt, &self.secret_mask(owners, given.iter().map(named)).await?))
    }

    /// The first repository if it is known, with the build of the session's branch.
    async fn first_repository(
        &self,
        wanted: &[UseRepository],
    ) -> Result<Option<Repository>, SessionError> {
        let Some(first) = wanted.first() else { return Ok(None) };
        let Some(known) = self.known_repository(first).await? else { return Ok(None) };
        Ok(Some(self.shared.repositories.on_branch(known, first.base.as_ref()).await?))
    }

    /// Takes a waiting sandbox of a repository that was known before the request.
    async fn take_member(
        &self,
        known: &Repository,
        checkouts: &[NewCheckout],
        choice: &AgentChoice,
        author: &Author,
        user: &str,
    ) -> Option<ClaimedMember> {
        let [checkout] = checkouts else { return None };
        if checkout.base != known.base {
            return None;
        }
        let owners = shared_owners([known.name.clone()].into_iter(), author);
        self.shared.pool.take(known, choice, &owners, user).await
    }

    /// The secrets and network rules that a new session is given.
    fn own_writes(
        &self,
        id: &SessionId,
        secrets: &BTreeMap<String, Secret<String>>,
        allow: &[String],
    ) -> Result<Vec<Write>, SessionError> {
        let mut writes = Vec::with_capacity(allow.len() + secrets.len());
        for text in allow {
            writes.push(Write::NetworkRule(session_rule(id, text)?));
        }
        writes.extend(self.secret_writes(id, secrets)?);
        Ok(writes)
    }

    /// Whose secrets a session that is about to be created uses, besides its own.
    async fn owners_of_new(
        &self,
        wanted: &[UseRepository],
        author: &Author,
        secrets_of: Option<SessionId>,
    ) -> Result<Vec<SecretOwner>, SessionError> {
        let mut known = Vec::new();
        for one in wanted {
            known.extend(self.known_repository(one).await?.map(|repository| repository.name));
        }
        let mut owners = shared_owners(known.into_iter(), author);
        owners.splice(0..0, secrets_of.map(SecretOwner::Session));
        Ok(owners)
    }

    /// The model services as a session finds them that is created with these secrets.
    async fn services_of_new(
        &self,
        owners: &[SecretOwner],
        given: &BTreeMap<String, Secret<String>>,
    ) -> Vec<ModelService> {
        let mut services = self.model_services(owners).await;
        services.iter_mut().for_each(|service| service.accept_key_of(given));
        services
    }

    /// The model services, and where the key of each comes from.
    pub async fn model_services(&self, owners: &[SecretOwner]) -> Vec<ModelService> {
        let mut services = self.shared.sandboxes.doors.model_services(owners).await;
        self.shared.sandboxes.agents.assign(services.iter_mut());
        services
    }

    /// The MCP servers behind the gateway, and where the key of each comes from.
    pub async fn mcp_services(&self, owners: &[SecretOwner]) -> Vec<McpService> {
        self.shared.sandboxes.doors.mcp_services(owners).await
    }

    /// The model services, or one of them, and the models that each lists now.
    pub async fn models(
        &self,
        owners: &[SecretOwner],
        only: Option<&UpstreamName>,
    ) -> Vec<ServiceModels> {
        let mut models = self.shared.sandboxes.doors.models(owners, only).await;
        self.shared.sandboxes.agents.assign(models.iter_mut().map(|one| &mut one.service));
        models
    }

    /// Refuses a session whose first model call would fail.
    pub(super) async fn check_model_key(
        &self,
        agent: &AgentName,
        model: Option<&ModelRef>,
        owners: &[SecretOwner],
    ) -> Result<(), SessionError> {
        check_model_key(&self.model_services(owners).await, agent, model)
    }

    async fn check_key_free(&self, key: &SessionKey) -> Result<(), SessionError> {
        match self.shared.store.session_by_key(key).await? {
            None => Ok(()),
            Some(session) => Err(SessionError::conflict(
                "key_taken",
                format!("key `{}` is already used by session {session}", key.text),
                "`harvest send KEY PROMPT` continues that session; or choose another key",
            )),
        }
    }

    /// The session that this user created with this key.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn by_key(&self, key: &SessionKey) -> Result<Option<SessionId>, SessionError> {
        Ok(self.shared.store.session_by_key(key).await?)
    }

    /// The authors of the sessions that have this snapshot; empty for a standalone sandbox's
    /// snapshot.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn snapshot_authors(
        &self,
        snapshot: &SnapshotId,
    ) -> Result<Vec<Author>, SessionError> {
        Ok(self.shared.store.snapshot_authors(snapshot).await?)
    }

    /// The first writes of a session that starts from a snapshot.
    async fn start_from(&self, snapshot: &SnapshotId) -> Result<Vec<Write>, SessionError> {
        let (store, provider) = (&self.shared.store, &self.shared.sandboxes.provider);
        if store.removal_list().await?.contains(&Removal::Snapshot(snapshot.clone()))
            || !provider.can_start_from(&StartFrom::Snapshot(snapshot.clone())).await?
        {
            return Err(SessionError::missing(format!("snapshot {snapshot}")));
        }
        let (at, detail) = (now(), format!("start from {snapshot}"));
        let body = EventBody::Restored { snapshot_id: Some(snapshot.clone()), detail };
        let mut writes = vec![Write::Event { at, turn: None, body: Box::new(body) }];
        // Only snapshots of sessions get a row; the session must not delete a standalone one with
        // itself.
        if !store.snapshot_authors(snapshot).await?.is_empty() {
            writes.push(Write::SnapshotShare { snapshot: snapshot.clone(), at });
        }
        Ok(writes)
    }

    async fn checkouts(
        &self,
        wanted: Vec<UseRepository>,
        author: &Author,
    ) -> Result<Vec<NewCheckout>, SessionError> {
        let (mut checkouts, mut names) = (Vec::with_capacity(wanted.len()), HashSet::new());
        for one in wanted {
            let repository = self.find_or_add_repository(&one, author).await?;
            if !names.insert(repository.name.clone()) {
                return Err(invalid(format!("repository `{}` is listed twice", repository.name)));
            }
            // The registered base was checked with its repository.
            if let Some(base) = one.base.as_ref().filter(|_| one.base != repository.base) {
                self.shared.repositories.check_branch(&repository, base, author).await?;
            }
            let base = one.base.or(repository.base);
            checkouts.push(NewCheckout { repository: repository.name, base, base_commit: None });
        }
        Ok(checkouts)
    }

    async fn known_repository(
        &self,
        wanted: &UseRepository,
    ) -> Result<Option<Repository>, SessionError> {
        let repositories = &self.shared.repositories;
        let url = match (&wanted.name, &wanted.url) {
            (Some(name), _) => match repositories.resolve(name).await {
                Ok(name) => return repositories.get(&name).await.map(Some),
                // `OWNER/NAME` is also an address.
                Err(SessionError::NotFound { .. }) if is_short(name) => name.as_str(),
                Err(error) => return Err(error),
            },
            (None, url) => url.as_deref().unwrap_or_default(),
        };
        let url = repositories.checked_url(url)?;
        Ok(repositories.list().await?.into_iter().find(|known| is_same_url(&known.url, &url)))
    }

    async fn find_or_add_repository(
        &self,
        wanted: &UseRepository,
        author: &Author,
    ) -> Result<Repository, SessionError> {
        if let Some(known) = self.known_repository(wanted).await? {
            return Ok(known);
        }
        let repositories = &self.shared.repositories;
        let address = wanted.name.as_deref().or(wanted.url.as_deref()).unwrap_or_default();
        let url = &repositories.checked_url(address)?;
        let add = AddRepository { url: url.to_owned(), ..AddRepository::default() };
        repositories.add(add, author).await.map_err(|error| match error {
            SessionError::Conflict { code: "exists", what, .. } => SessionError::conflict(
                "exists",
                format!("{what} with a URL other than {url}"),
                "register it under another name first: `harvest repo add URL --name OWNER/NAME`",
            ),
            other => other,
        })
    }
}

/// A session that is about to be created.
pub(super) struct PlannedSession {
    pub(super) id: SessionId,
    /// Further writes in the same transaction.
    pub(super) writes: Vec<Write>,
    /// The session whose secrets it gets with these writes.
    pub(super) secrets_of: Option<SessionId>,
}

fn check_model_key(
    services: &[ModelService],
    agent: &AgentName,
    model: Option<&ModelRef>,
) -> Result<(), SessionError> {
    UnusableModel::check(services, agent, model).map_err(|error| {
        let hint = error.hint().unwrap_or_default().into_owned();
        SessionError::conflict(error.code(), error.to_string(), hint)
    })
}

fn invalid(what: impl Into<String>) -> SessionError {
    SessionError::invalid("invalid_repositories", what)
}

/// Merges `repository` and `base` with `repositories` into one list.
fn requested_repositories(
    repository: Option<String>,
    base: Option<BranchName>,
    repositories: Vec<UseRepository>,
) -> Result<Vec<UseRepository>, SessionError> {
    let all = match (repository, base, repositories) {
        (Some(_), _, listed) if !listed.is_empty() => {
            return Err(invalid("give either `repository` or `repositories`, not both"));
        }
        (None, Some(_), _) => {
            return Err(invalid(
                "`base` needs `repository`; in `repositories`, each entry has its own `base`",
            ));
        }
        (Some(one), base, _) if one.contains("://") || of_ssh(&one).is_some() => {
            vec![UseRepository { name: None, url: Some(one), base }]
        }
        (Some(one), base, _) => {
            let name = one.parse().map_err(|invalid: InvalidRepositoryRef| {
                SessionError::invalid("invalid_name", invalid.to_string())
            })?;
            vec![UseRepository { name: Some(name), url: None, base }]
        }
        (None, None, listed) => listed,
    };
    if all.len() > MAX_REPOSITORIES {
        return Err(invalid(format!("at most {MAX_REPOSITORIES} repositories per session")));
    }
    for one in &all {
        if one.name.is_some() == one.url.is_some() {
            return Err(invalid("each repository needs either `name` or `url`"));
        }
    }
    Ok(all)
}

/// Accepts names that every shell accepts. Names that start with `HARVEST_` are reserved.
fn check_env(env: &BTreeMap<String, String>) -> Result<(), SessionError> {
    let invalid = |what: String| Err(SessionError::invalid("invalid_env", what));
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    for (name, value) in env {
        if name.is_empty()
            || name.len() > 200
            || name.as_bytes()[0].is_ascii_digit()
            || !name.bytes().all(is_allowed)
        {
            let name: String = name.chars().take(100).collect();
            return invalid(format!("invalid variable name `{name}`: use letters, digits and `_`"));
        }
        if name.starts_with("HARVEST_") {
            return invalid(format!("`{name}` is reserved: names cannot start with `HARVEST_`"));
        }
        if value.contains('\0') {
            return invalid(format!("the value of `{name}` contains a NUL character"));
        }
    }
    let bytes: usize = env.iter().map(|(name, value)| name.len() + value.len()).sum();
    if env.len() > MAX_VARIABLES || bytes > MAX_VARIABLE_BYTES {
        return invalid(format!(
            "at most {MAX_VARIABLES} variables and {MAX_VARIABLE_BYTES} bytes in total per session"
        ));
    }
    Ok(())
}

// `/v1/sessions/counts` is another resource, and the CLI reads `-` as the newest session.
const RESERVED_KEYS: [&str; 4] = ["counts", "-", ".", ".."];

fn check_key(key: &str) -> Result<(), SessionError> {
    let is_valid =
        (1..=MAX_KEY_CHARS).contains(&key.chars().count()) && !key.chars().any(char::is_control);
    if key.parse::<SessionId>().is_ok() || RESERVED_KEYS.contains(&key) {
        let what = format!("`{key}` cannot be a key: it means something else where an id is given");
        return Err(SessionError::invalid("invalid_key", what));
    }
    match is_valid && key.trim() == key {
        true => Ok(()),
        false => Err(SessionError::invalid(
            "invalid_key",
            format!(
                "a key must be 1 to {MAX_KEY_CHARS} characters on one line, without leading or trailing blanks"
            ),
        )),
    }
}

/// The rule of a name that a new session may connect to.
fn session_rule(session: &SessionId, text: &str) -> Result<NetworkRule, SessionError> {
    let target: RuleTarget = text
        .parse()
        .map_err(|error: InvalidPort| SessionError::invalid("invalid_port", error.to_string()))?;
    let set = SetNetworkRule { verdict: RuleVerdict::Allow, ports: target.ports, private: false };
    network_rule(&RuleOwner::Session(session.clone()), &target.name, &set)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> UseRepository {
        UseRepository { name: Some(name.parse().unwrap()), ..UseRepository::default() }
    }

    #[test]
    fn repository_and_repositories_are_mutually_exclusive() {
        let next = || Some("next".parse().unwrap());
        let one = requested_repositories(Some("app".into()), next(), Vec::new()).unwrap();
        assert_eq!(one, [UseRepository { base: next(), ..named("app") }]);
        let url = requested_repositories(Some("https://h/app".into()), None, Vec::new()).unwrap();
        assert_eq!(url[0].url.as_deref(), Some("https://h/app"));
        assert_eq!(requested_repositories(None, None, Vec::new()).unwrap(), []);
        assert!(requested_repositories(Some("app".into()), None, vec![named("b")]).is_err());
        assert!(requested_repositories(None, next(), vec![named("b")]).is_err());
        let both = UseRepository { url: Some("https://h/app".into()), ..named("app") };
        assert!(requested_repositories(None, None, vec![both]).is_err());
        assert!(requested_repositories(None, None, vec![UseRepository::default()]).is_err());
        assert!(
            requested_repositories(None, None, vec![named("a"); MAX_REPOSITORIES + 1]).is_err()
        );
    }

    #[test]
    fn invalid_and_reserved_variables_are_refused() {
        let check =
            |name: &str, value: &str| check_env(&[(name.to_owned(), value.to_owned())].into());
        assert!(check("NODE_ENV", "a=b\nc").is_ok() && check("_", "").is_ok());
        for bad in ["", "1A", "A B", "A=B", "Ä", "HARVEST_WORKSPACE", &"A".repeat(201)] {
            assert!(check(bad, "x").is_err(), "{bad}");
        }
        assert!(check("A", "\0").is_err() && check("A", &"x".repeat(MAX_VARIABLE_BYTES)).is_err());
    }

    #[test]
    fn key_must_be_one_trimmed_line() {
        assert!(check_key("issue #12").is_ok());
        for bad in ["", " a", "a\n", "counts", "-", "ses_0123456789ab", &"k".repeat(201)] {
            assert!(check_key(bad).is_err(), "{bad:?}");
        }
    }
}
