//! A test server in its own folder, and helpers that wait for sessions.

use harvest_forge::{
    CheckStatus, Forge, ForgeFailure, Operation, PullRequestChange, PullRequestSpec, ReadAnswer,
    ReadRoute, RemoteRepository, Webhook, WebhookError, WebhookHeaders, read_webhook,
};
use harvest_gateway::ledger::{MostTokens, PlannedCall};
use harvest_proto::CallId;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

/// Everything a server needs, in its own folder.
pub(crate) struct Harness {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) store: Store,
    pub(crate) fake: Fake,
    pub(crate) doors: Arc<RecordingDoors>,
    pub(crate) pulls: Arc<RecordingPulls>,
    pub(crate) vault: Arc<Vault>,
    pub(crate) config: Config,
}

#[derive(Default)]
pub(crate) struct RecordingDoors(
    pub(crate) Mutex<Vec<DoorPolicy>>,
    /// The tools of each session.
    pub(crate) Mutex<HashMap<SessionId, Arc<dyn Tools>>>,
    /// The commit of every branch.
    pub(crate) Mutex<String>,
    /// What each look at the secrets finds; the last result stays. Empty for none.
    pub(crate) Mutex<VecDeque<Result<Vec<NamedSecret>, SecretsUnavailable>>>,
);

impl RecordingDoors {
    /// Sets what each look at the secrets finds: names with values, or a failure.
    pub(crate) fn find_secrets(&self, looks: &[Option<&[(&str, &str)]>]) {
        let secret = |(name, value): &(&str, &str)| NamedSecret {
            name: (*name).to_owned(),
            value: Secret::new((*value).to_owned()),
        };
        let found = |look: &Option<&[(&str, &str)]>| match look {
            Some(secrets) => Ok(secrets.iter().map(secret).collect()),
            None => Err(SecretsUnavailable),
        };
        *self.3.lock().unwrap() = looks.iter().map(found).collect();
    }
}

#[async_trait]
impl Doors for RecordingDoors {
    fn open(
        &self,
        _: Box<dyn DoorListener>,
        policy: DoorPolicy,
        observer: Option<DoorObserver>,
        tools: Option<Arc<dyn Tools>>,
    ) -> Box<dyn Any + Send> {
        let session = policy.session.clone();
        self.1.lock().unwrap().extend(tools.map(|tools| (session, tools)));
        self.0.lock().unwrap().push(policy);
        // A build's door: its sandbox looks up a name that is not allowed.
        if let Some(observer) = observer {
            let (name, reason) = ("example.org".to_owned(), "not allowed".to_owned());
            observer(EventBody::EgressRefused { name, reason, hint: None });
        }
        Box::new(())
    }

    async fn check_remote(&self, access: &GitAccess, _: &[SecretOwner]) -> Result<(), String> {
        if access.url.contains("nowhere") { Err("no such remote".to_owned()) } else { Ok(()) }
    }

    async fn secret_values(
        &self,
        _: &[SecretOwner],
    ) -> Result<Vec<NamedSecret>, SecretsUnavailable> {
        let mut looks = self.3.lock().unwrap();
        match looks.len() {
            0 => Ok(Vec::new()),
            1 => looks[0].clone(),
            _ => looks.pop_front().unwrap(),
        }
    }

    async fn tip(
        &self,
        _: &GitAccess,
        _: &[SecretOwner],
        branch: Option<&BranchName>,
    ) -> Option<Option<String>> {
        let exists = branch.is_none_or(|branch| branch.as_str() != "nobranch");
        let commit = self.2.lock().unwrap().clone();
        // Without one the remote does not answer to the schedule.
        let answers = branch.is_some() || !commit.is_empty();
        answers.then(|| exists.then_some(commit))
    }
}

/// A forge that has every repository.
#[derive(Default)]
pub(crate) struct RecordingPulls {
    /// The pull requests that were opened.
    pub(crate) opened: Mutex<Vec<(String, PullRequestSpec)>>,
    /// The open pull requests, by the URL of their repositories.
    pub(crate) open: Mutex<HashMap<String, PullRequest>>,
    pub(crate) statuses: Mutex<Vec<(String, CheckStatus)>>,
    pub(crate) comments: Mutex<Vec<(u64, String)>>,
    /// What was read of repositories, with their URLs.
    pub(crate) reads: Mutex<Vec<(String, ReadRoute)>>,
    /// Why calls are refused.
    pub(crate) refuses: Mutex<Option<fn() -> ForgeFailure>>,
    /// The URLs of removed repositories; their removal can be made to fail.
    pub(crate) removed: Mutex<Vec<String>>,
    pub(crate) keeps_copies: AtomicBool,
}

impl RecordingPulls {
    fn check(&self) -> Result<(), ForgeFailure> {
        match *self.refuses.lock().unwrap() {
            Some(failure) => Err(failure()),
            None => Ok(()),
        }
    }
}

#[async_trait]
impl Forge for RecordingPulls {
    fn owns(&self, url: &str) -> bool {
        !url.contains("plain")
    }

    async fn credential(
        &self,
        _url: &str,
        _operation: Operation,
    ) -> Result<Option<Secret<String>>, ForgeFailure> {
        self.check()?;
        Ok(Some(Secret::new("0f-the-f0rge".to_owned())))
    }

    async fn find_pull_request(
        &self,
        repository: &RemoteRepository,
        branch: &BranchName,
    ) -> Result<Option<PullRequest>, ForgeFailure> {
        self.check()?;
        let open = self.open.lock().unwrap();
        let found = open.get(&repository.url).filter(|pull| pull.branch == *branch);
        Ok(found.filter(|pull| pull.state == PullRequestState::Open).cloned())
    }

    async fn pull_request(
        &self,
        repository: &RemoteRepository,
        number: u64,
    ) -> Result<PullRequest, ForgeFailure> {
        let open = self.open.lock().unwrap();
        open.get(&repository.url).cloned().ok_or(ForgeFailure::NoPullRequest { number })
    }

    async fn open_pull_request(
        &self,
        repository: &RemoteRepository,
        spec: PullRequestSpec,
    ) -> Result<PullRequest, ForgeFailure> {
        self.opened.lock().unwrap().push((repository.url.clone(), spec.clone()));
        // A forge answers later; the client of a tool may be gone by then.
        tokio::task::yield_now().await;
        let PullRequestSpec { title, body, branch, base, draft } = spec;
        let pull = PullRequest {
            number: 7,
            url: "http://forge/7".into(),
            title,
            body,
            state: PullRequestState::Open,
            draft,
            branch,
            base,
            commit: "c0ffee".into(),
            evidence: None,
        };
        self.open.lock().unwrap().insert(repository.url.clone(), pull.clone());
        Ok(pull)
    }

    async fn update_pull_request(
        &self,
        repository: &RemoteRepository,
        number: u64,
        change: PullRequestChange,
    ) -> Result<PullRequest, ForgeFailure> {
        self.check()?;
        let mut open = self.open.lock().unwrap();
        let pull = open.get_mut(&repository.url).ok_or(ForgeFailure::NoPullRequest { number })?;
        pull.title = change.title.unwrap_or(pull.title.clone());
        pull.body = change.body.unwrap_or(pull.body.clone());
        Ok(pull.clone())
    }

    async fn set_draft(
        &self,
        repository: &RemoteRepository,
        number: u64,
        draft: bool,
    ) -> Result<PullRequest, ForgeFailure> {
        let mut open = self.open.lock().unwrap();
        let pull = open.get_mut(&repository.url).ok_or(ForgeFailure::NoPullRequest { number })?;
        pull.draft = draft;
        Ok(pull.clone())
    }

    async fn merge_pull_request(
        &self,
        _repository: &RemoteRepository,
        _number: u64,
    ) -> Result<PullRequest, ForgeFailure> {
        Err(ForgeFailure::MergedElsewhere { url: "http://forge/7".to_owned() })
    }

    async fn set_status(
        &self,
        _repository: &RemoteRepository,
        commit: &str,
        status: CheckStatus,
    ) -> Result<(), ForgeFailure> {
        self.statuses.lock().unwrap().push((commit.to_owned(), status));
        Ok(())
    }

    async fn comment(
        &self,
        _repository: &RemoteRepository,
        number: u64,
        body: &str,
    ) -> Result<String, ForgeFailure> {
        self.comments.lock().unwrap().push((number, body.to_owned()));
        Ok("http://forge/7#1".to_owned())
    }

    async fn read(
        &self,
        repository: &RemoteRepository,
        route: &ReadRoute,
    ) -> Result<ReadAnswer, ForgeFailure> {
        self.reads.lock().unwrap().push((repository.url.clone(), route.clone()));
        Ok(ReadAnswer { status: 200, body: b"[]".to_vec(), next: None })
    }

    async fn remove_repository(&self, url: &str) -> Result<bool, ForgeFailure> {
        if self.keeps_copies.load(Ordering::SeqCst) {
            return Err(ForgeFailure::Other("the disk is full".into()));
        }
        self.removed.lock().unwrap().push(url.to_owned());
        Ok(true)
    }

    fn read_webhook(
        &self,
        headers: WebhookHeaders<'_>,
        body: &[u8],
    ) -> Result<Webhook, WebhookError> {
        read_webhook(&Secret::new(WEBHOOK_SECRET.to_owned()), headers, body)
    }
}

pub(crate) const WEBHOOK_SECRET: &str = "webh00k-s3cret";

/// Runs a command in a session's sandbox.
pub(crate) async fn exec(
    sessions: &Sessions,
    session: &SessionId,
    request: ExecRequest,
) -> Result<ExecLines, SessionError> {
    Ok(sessions.sandbox_handle(session).await?.exec_lines(request, None).await?)
}

/// A call of a model without a price.
pub(crate) fn planned_call() -> PlannedCall {
    PlannedCall {
        id: CallId::random(),
        upstream: "local".parse().unwrap(),
        keyed: false,
        model: "llama".to_owned(),
        fallbacks: Vec::new(),
        most: MostTokens { input: Some(1000), output: Some(100), responses: 1 },
    }
}

/// The repository that every harness registers.
pub(crate) fn demo() -> RepositoryName {
    "local/demo".parse().unwrap()
}

pub(crate) fn ada() -> Author {
    Author { name: "Ada".into(), email: "ada@example.org".into() }
}

impl Harness {
    pub(crate) async fn new() -> Self {
        Self::with(Timeouts::default()).await
    }

    pub(crate) async fn with(timeouts: Timeouts) -> Self {
        Self::at(tempfile::tempdir().unwrap(), timeouts).await
    }

    pub(crate) async fn at(folder: tempfile::TempDir, timeouts: Timeouts) -> Self {
        Self {
            store: Store::open(&folder.path().join("store.db")).await.unwrap(),
            vault: Arc::new(Vault::open(&folder.path().join("key")).unwrap()),
            fake: Fake::new(),
            doors: Arc::default(),
            pulls: Arc::default(),
            config: Config { timeouts, ..Config::default() },
            folder,
        }
    }

    pub(crate) async fn lease(&self) -> Lease {
        self.store.server_lease(Timestamp::from_millis(0)).await.unwrap()
    }

    /// Starts a server with a newer lease than the previous one.
    pub(crate) async fn serve(&self) -> Sessions {
        let lease = self.lease().await;
        self.serve_with(lease).await
    }

    pub(crate) async fn serve_with(&self, lease: Lease) -> Sessions {
        self.serve_parts(lease).await.sessions
    }

    /// As [`Harness::serve_with`], with accounts and repositories.
    pub(crate) async fn serve_parts(&self, lease: Lease) -> ServerParts {
        let parts = ServerParts::open(self.dependencies(lease)).await.unwrap();
        let url = "https://example.org/demo.git".to_owned();
        let _may_exist =
            parts.repositories.add(AddRepository { url, ..AddRepository::default() }, &ada()).await;
        parts
    }

    pub(crate) fn dependencies(&self, lease: Lease) -> Dependencies {
        Dependencies {
            store: self.store.clone(),
            lease,
            provider: Arc::new(self.fake.clone()),
            doors: self.doors.clone(),
            forge: self.pulls.clone(),
            vault: self.vault.clone(),
            config: self.config.clone(),
        }
    }

    pub(crate) async fn session(&self, sessions: &Sessions, prompt: Option<&str>) -> Session {
        let create = CreateSession {
            repository: Some("demo".into()),
            prompt: prompt.map(|text| text.parse().unwrap()),
            ..CreateSession::default()
        };
        sessions.create(create, ada()).await.unwrap()
    }
}

pub(crate) async fn send(sessions: &Sessions, session: &SessionId, text: &str) -> PromptId {
    let create = CreatePrompt::new(text.parse().unwrap());
    sessions.prompt(session, create, ada()).await.unwrap().id
}

/// Follows the session until an event matches. The timeout turns a hang into a failure.
pub(crate) async fn until(
    sessions: &Sessions,
    session: &SessionId,
    mut fits: impl FnMut(&Event) -> bool,
) -> Event {
    let (_, mut events) = sessions.follow(session, 0).await.unwrap();
    let wait = async {
        while let Some(event) = events.next().await {
            if fits(&event) {
                return event;
            }
        }
        panic!("the events ended");
    };
    match tokio::time::timeout(Duration::from_secs(20), wait).await {
        Ok(event) => event,
        Err(_) => panic!("no matching event: {:#?}", all(sessions, session).await),
    }
}

pub(crate) async fn until_state(sessions: &Sessions, session: &SessionId, wanted: SessionState) {
    let wait = async {
        let (_, mut events) = sessions.follow(session, 0).await.unwrap();
        loop {
            if sessions.get(session).await.unwrap().state == wanted {
                return;
            }
            events.next().await;
        }
    };
    if tokio::time::timeout(Duration::from_secs(20), wait).await.is_err() {
        panic!("never {wanted:?}: {:#?}", all(sessions, session).await);
    }
}

pub(crate) async fn until_status(
    sessions: &Sessions,
    session: &SessionId,
    prompt: &PromptId,
    wanted: PromptStatus,
) {
    let wait = async {
        let (_, mut events) = sessions.follow(session, 0).await.unwrap();
        while status(sessions, session, prompt).await != wanted {
            events.next().await;
        }
    };
    if tokio::time::timeout(Duration::from_secs(20), wait).await.is_err() {
        panic!("never {wanted:?}: {:#?}", all(sessions, session).await);
    }
}

pub(crate) async fn all(sessions: &Sessions, session: &SessionId) -> Vec<Event> {
    sessions.events(session, 0, 1000).await.unwrap()
}

pub(crate) async fn status(
    sessions: &Sessions,
    session: &SessionId,
    prompt: &PromptId,
) -> PromptStatus {
    let prompts = sessions.prompts(session).await.unwrap();
    prompts.iter().find(|row| row.id == *prompt).unwrap().status
}

pub(crate) fn assert_gapless(events: &[Event]) {
    let seqs: Vec<u64> = events.iter().map(|event| event.seq).collect();
    assert_eq!(seqs, (1..=events.len() as u64).collect::<Vec<_>>());
}

pub(crate) async fn sandbox(sessions: &Sessions, session: &SessionId) -> SandboxId {
    sessions.get(session).await.unwrap().sandbox.unwrap()
}

pub(crate) fn ended(event: &Event) -> bool {
    matches!(event.body, EventBody::TurnEnded { .. })
}

pub(crate) fn started(event: &Event) -> bool {
    matches!(event.body, EventBody::TurnStarted { .. })
}
