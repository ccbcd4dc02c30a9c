//! GitHub as a forge: GitHub.com, or an Enterprise server by its base URL. Signs in as an App or
//! with a token; a repository's or an author's own token comes first. Requests are few and small:
//! own structs read only the fields that are used, because GitHub's objects differ by server.

mod api;
mod app;
mod conditional;
mod objects;
mod settings;

use async_trait::async_trait;
use harvest_proto::{BranchName, Secret, api::PullRequest};
use serde_json::json;

use self::{
    api::{Api, Call},
    app::AppTokens,
    conditional::KnownPulls,
    objects::Pull,
};
use crate::{
    CheckStatus, Clock, Forge, ForgeFailure, Operation, PullRequestChange, PullRequestSpec,
    ReadAnswer, ReadRoute, RemoteRepository, Webhook, WebhookError, WebhookHeaders,
    read_route::next_page, read_webhook, traits::GITHUB,
};
pub use settings::{AppKey, GitHubSettings, InvalidGitHubUrl, SignIn};
use settings::{RepositoryPath, Site};

// GitHub's limit of a status's description.
const MAX_DESCRIPTION: usize = 140;
// GitHub's limit of a body, and what a title may have.
const MAX_BODY: usize = 65_536;
const MAX_TITLE: usize = 256;

// The REST API has no route for either.
const READY: &str = "mutation($id:ID!){markPullRequestReadyForReview(input:{pullRequestId:$id})\
                     {pullRequest{isDraft}}}";
const TO_DRAFT: &str = "mutation($id:ID!){convertPullRequestToDraft(input:{pullRequestId:$id})\
                        {pullRequest{isDraft}}}";

/// The client of one GitHub.
#[derive(Debug)]
pub struct GitHub {
    site: Site,
    api: Api,
    sign_in: SignIn,
    tokens: AppTokens,
    known: KnownPulls,
    webhook_secret: Option<Secret<String>>,
}

impl GitHub {
    /// Makes no request.
    ///
    /// # Errors
    /// When the URL is not that of a GitHub.
    pub fn new(settings: GitHubSettings) -> Result<Self, InvalidGitHubUrl> {
        Self::with_clock(settings, Clock::system())
    }

    /// As [`GitHub::new`], with a clock of the caller's, which decides when tokens are renewed.
    ///
    /// # Errors
    /// As [`GitHub::new`].
    pub fn with_clock(settings: GitHubSettings, clock: Clock) -> Result<Self, InvalidGitHubUrl> {
        let GitHubSettings { url, api, certificate, sign_in, webhook_secret } = settings;
        let site = Site::parse(&url)?;
        let api = match api {
            Some(api) => api.trim_end_matches('/').to_owned(),
            None => site.api(),
        };
        let api = Api::new(api, certificate);
        let (tokens, known) = (AppTokens::new(clock), KnownPulls::default());
        Ok(Self { site, api, sign_in, tokens, known, webhook_secret })
    }

    /// GitHub.com without a sign-in: repositories are used with their own tokens.
    #[must_use]
    pub fn anonymous() -> Self {
        Self::new(GitHubSettings::new(GITHUB)).expect("GitHub's own URL is one")
    }

    fn path(&self, url: &str) -> Result<RepositoryPath, ForgeFailure> {
        self.site.repository(url).ok_or_else(|| ForgeFailure::NoApi { url: url.to_owned() })
    }

    /// The token for an operation: the repository's or author's own, else that of the sign-in.
    async fn token(
        &self,
        repository: &RemoteRepository,
        path: &RepositoryPath,
        operation: Operation,
    ) -> Result<(Secret<String>, bool), ForgeFailure> {
        if let Some(own) = &repository.token {
            return Ok((own.clone(), false));
        }
        let signed_in = self.sign_in_token(path, operation).await?;
        let missing = || ForgeFailure::NotSignedIn { repository: path.to_string() };
        Ok((signed_in.ok_or_else(missing)?, matches!(self.sign_in, SignIn::App { .. })))
    }

    async fn sign_in_token(
        &self,
        path: &RepositoryPath,
        operation: Operation,
    ) -> Result<Option<Secret<String>>, ForgeFailure> {
        match &self.sign_in {
            SignIn::None => Ok(None),
            SignIn::Token(token) => Ok(Some(token.clone())),
            SignIn::App { id, key, installation } => {
                let app = app::AppSignIn { id: *id, key, installation: *installation };
                self.tokens.get(&self.api, app, path, operation).await.map(Some)
            }
        }
    }

    /// Sends a request about a repository. One that is refused with a token of the App, which may
    /// have been revoked, is sent again with a new one.
    async fn send(
        &self,
        repository: &RemoteRepository,
        path: &RepositoryPath,
        call: Call<'_>,
    ) -> Result<api::Answer, ForgeFailure> {
        let (token, of_app) = self.token(repository, path, call.operation).await?;
        let refused = match self.api.send(path, &call, &token, of_app).await {
            Err(ForgeFailure::TokenRefused { repository }) if of_app => repository,
            other => return other,
        };
        self.tokens.forget(&token);
        let (token, of_app) = self.token(repository, path, call.operation).await?;
        tracing::info!(repository = refused, "a token of the App was refused; using a new one");
        self.api.send(path, &call, &token, of_app).await
    }
}

fn cut(text: &str, characters: usize) -> String {
    match text.char_indices().nth(characters) {
        Some((end, _)) => text[..end].to_owned(),
        None => text.to_owned(),
    }
}

#[async_trait]
impl Forge for GitHub {
    fn names_at(&self) -> &str {
        self.site.base()
    }

    fn owns(&self, url: &str) -> bool {
        self.site.repository(url).is_some()
    }

    async fn credential(
        &self,
        url: &str,
        operation: Operation,
    ) -> Result<Option<Secret<String>>, ForgeFailure> {
        self.sign_in_token(&self.path(url)?, operation).await
    }

    fn forget_credential(&self, _url: &str, refused: &Secret<String>) {
        self.tokens.forget(refused);
    }

    async fn find_pull_request(
        &self,
        repository: &RemoteRepository,
        branch: &BranchName,
    ) -> Result<Option<PullRequest>, ForgeFailure> {
        let path = self.path(&repository.url)?;
        let head = format!("{}:{branch}", path.owner);
        let query = [("state", "open"), ("head", &head), ("per_page", "100")];
        let call = Call::get("/pulls", Operation::PullRequests, "list the pull requests of");
        let answer = self.send(repository, &path, call.with_query(&query)).await?;
        let all: Vec<Pull> = answer.json(&path)?;
        // A server that ignores the filter lists others as well.
        let own = |pull: &Pull| pull.is_open_head(&path, branch);
        let found = all.into_iter().find(own);
        Ok(found.and_then(|pull| pull.into_pull_request(&self.site, &path)))
    }

    async fn pull_request(
        &self,
        repository: &RemoteRepository,
        number: u64,
    ) -> Result<PullRequest, ForgeFailure> {
        let path = self.path(&repository.url)?;
        let known = self.known.etag(&path, number);
        let route = format!("/pulls/{number}");
        let call = Call::get(&route, Operation::PullRequests, "read a pull request of");
        let call = Call { etag: known.as_deref(), ..call };
        let answer = self.send(repository, &path, call).await.map_err(|error| match error {
            ForgeFailure::NoRepository { .. } => ForgeFailure::NoPullRequest { number },
            other => other,
        })?;
        if answer.not_modified {
            let kept = self.known.get(&path, number);
            return kept.ok_or_else(|| ForgeFailure::other("GitHub answered 304 unasked"));
        }
        let pull = answer.json::<Pull>(&path)?.checked(&self.site, &path)?;
        self.known.keep(&path, answer.etag, &pull);
        Ok(pull)
    }

    async fn open_pull_request(
        &self,
        repository: &RemoteRepository,
        spec: PullRequestSpec,
    ) -> Result<PullRequest, ForgeFailure> {
        let path = self.path(&repository.url)?;
        let body = json!({
            "title": cut(&spec.title, MAX_TITLE),
            "body": cut(&spec.body, MAX_BODY),
            "head": spec.branch,
            "base": spec.base,
            "draft": spec.draft,
        });
        let doing = "open a pull request in";
        let call = Call::post("/pulls", Operation::PullRequests, doing).with_body(&body);
        let failed = match self.send(repository, &path, call).await {
            Ok(answer) => return answer.json::<Pull>(&path)?.checked(&self.site, &path),
            Err(failed) => failed,
        };
        // GitHub may have opened it nevertheless, or another process did at the same time.
        match self.find_pull_request(repository, &spec.branch).await {
            Ok(Some(found)) => Ok(found),
            _ => Err(failed),
        }
    }

    async fn update_pull_request(
        &self,
        repository: &RemoteRepository,
        number: u64,
        change: PullRequestChange,
    ) -> Result<PullRequest, ForgeFailure> {
        let path = self.path(&repository.url)?;
        let mut body = json!({});
        if let Some(title) = change.title {
            body["title"] = cut(&title, MAX_TITLE).into();
        }
        if let Some(text) = change.body {
            body["body"] = cut(&text, MAX_BODY).into();
        }
        let route = format!("/pulls/{number}");
        let call = Call::patch(&route, Operation::PullRequests, "update a pull request of");
        let answer = self.send(repository, &path, call.with_body(&body)).await?;
        answer.json::<Pull>(&path)?.checked(&self.site, &path)
    }

    async fn set_draft(
        &self,
        repository: &RemoteRepository,
        number: u64,
        draft: bool,
    ) -> Result<PullRequest, ForgeFailure> {
        let path = self.path(&repository.url)?;
        let route = format!("/pulls/{number}");
        let call = Call::get(&route, Operation::PullRequests, "read a pull request of");
        let pull = self.send(repository, &path, call).await?.json::<Pull>(&path)?;
        let id = pull.node_id().map(str::to_owned);
        let current = pull.checked(&self.site, &path)?;
        if current.draft == draft {
            return Ok(current);
        }
        let id = id.ok_or_else(|| ForgeFailure::other("GitHub's pull request has no id"))?;
        let query = if draft { TO_DRAFT } else { READY };
        let body = json!({ "query": query, "variables": { "id": id } });
        let doing = "change whether a pull request is a draft in";
        self.send(repository, &path, Call::graphql(&body, Operation::Drafts, doing)).await?;
        Ok(PullRequest { draft, ..current })
    }

    async fn merge_pull_request(
        &self,
        repository: &RemoteRepository,
        number: u64,
    ) -> Result<PullRequest, ForgeFailure> {
        let url = self.pull_request(repository, number).await?.url;
        Err(ForgeFailure::MergedElsewhere { url })
    }

    async fn set_status(
        &self,
        repository: &RemoteRepository,
        commit: &str,
        status: CheckStatus,
    ) -> Result<(), ForgeFailure> {
        let path = self.path(&repository.url)?;
        let body = json!({
            "state": status.state.as_str(),
            "context": status.context,
            "description": cut(&status.description, MAX_DESCRIPTION),
        });
        let route = format!("/statuses/{commit}");
        let call = Call::post(&route, Operation::Statuses, "set the status of a commit of");
        self.send(repository, &path, call.with_body(&body)).await.map(drop)
    }

    async fn comment(
        &self,
        repository: &RemoteRepository,
        number: u64,
        body: &str,
    ) -> Result<String, ForgeFailure> {
        #[derive(serde::Deserialize)]
        struct Created {
            html_url: String,
        }
        let path = self.path(&repository.url)?;
        let body = json!({ "body": cut(body, MAX_BODY) });
        let route = format!("/issues/{number}/comments");
        let call = Call::post(&route, Operation::PullRequests, "comment on a pull request of");
        let answer = self.send(repository, &path, call.with_body(&body)).await?;
        Ok(answer.json::<Created>(&path)?.html_url)
    }

    async fn read(
        &self,
        repository: &RemoteRepository,
        route: &ReadRoute,
    ) -> Result<ReadAnswer, ForgeFailure> {
        let path = self.path(&repository.url)?;
        let query: Vec<(&str, &str)> =
            route.query.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let below = route.path();
        let call = Call {
            form: route.form,
            passes_refusals: true,
            ..Call::get(&below, route.operation(), "read")
        };
        let answer = self.send(repository, &path, call.with_query(&query)).await?;
        let next = answer.link.as_deref().and_then(next_page);
        Ok(ReadAnswer { status: answer.status.as_u16(), body: answer.body, next })
    }

    fn read_webhook(
        &self,
        headers: WebhookHeaders<'_>,
        body: &[u8],
    ) -> Result<Webhook, WebhookError> {
        let secret = self.webhook_secret.as_ref().ok_or(WebhookError::NotSetUp)?;
        read_webhook(secret, headers, body)
    }
}
