//! One method per API call.

use anyhow::{Context, Result};
use harvest_proto::{
    BlobId, PromptId, RepositoryName, RepositoryRef, Secret, SessionId, SnapshotId,
    api::{
        AddRepository, CreatePrompt, CreateSession, CreateToken, CreatedToken, DiffFiles,
        ExecRequest, FileChanges, ForkSession, Me, MovePrompt, Page, PinSnapshot, Prompt,
        PullRequest, Repository, RestoreSession, RetentionReport, Session, Snapshot, Token, Turn,
    },
};
use reqwest::Method;
use serde_json::{Value, json};

use super::{Client, path_segment, read};
use crate::follow::Lines;

impl Client {
    pub(crate) async fn sessions(&self) -> Result<Vec<Session>> {
        self.all("/v1/sessions?limit=200").await
    }

    /// Sessions that match all query parameters.
    pub(crate) async fn sessions_matching(
        &self,
        filters: &[(&str, String)],
    ) -> Result<Vec<Session>> {
        let mut query =
            reqwest::Url::parse("http://x/v1/sessions?limit=200").context("the URL is valid")?;
        query.query_pairs_mut().extend_pairs(filters);
        self.all(&format!("/v1/sessions?{}", query.query().unwrap_or_default())).await
    }

    pub(crate) async fn session(&self, id: &SessionId) -> Result<Session> {
        self.get(&format!("/v1/sessions/{id}")).await
    }

    pub(crate) async fn create(&self, body: &CreateSession) -> Result<Session> {
        self.post("/v1/sessions", body).await
    }

    pub(crate) async fn fork(&self, id: &SessionId, body: &ForkSession) -> Result<Vec<Session>> {
        let page: Page<Session> = self.post(&format!("/v1/sessions/{id}/fork"), body).await?;
        Ok(page.items)
    }

    pub(crate) async fn delete(&self, id: &SessionId) -> Result<()> {
        self.send(self.request(Method::DELETE, &format!("/v1/sessions/{id}"))).await.map(drop)
    }

    /// `verb` is `stop`, `resume`, `terminate` or `archive`.
    pub(crate) async fn post_verb(&self, id: &SessionId, verb: &str) -> Result<Session> {
        self.post(&format!("/v1/sessions/{id}/{verb}"), &json!({})).await
    }

    pub(crate) async fn restore(&self, id: &SessionId, turn: u32) -> Result<Session> {
        self.post(&format!("/v1/sessions/{id}/restore"), &RestoreSession { turn }).await
    }

    /// Returns the session and the snapshot it will resume from.
    pub(crate) async fn pause(&self, id: &SessionId) -> Result<Value> {
        self.post(&format!("/v1/sessions/{id}/pause"), &json!({})).await
    }

    pub(crate) async fn prompts(&self, id: &SessionId) -> Result<Vec<Prompt>> {
        self.all(&format!("/v1/sessions/{id}/prompts")).await
    }

    pub(crate) async fn prompt(&self, id: &SessionId, body: &CreatePrompt) -> Result<Prompt> {
        self.post(&format!("/v1/sessions/{id}/prompts"), body).await
    }

    pub(crate) async fn prompt_cancel(&self, id: &SessionId, prompt: &PromptId) -> Result<Prompt> {
        let request = self.request(Method::DELETE, &format!("/v1/sessions/{id}/prompts/{prompt}"));
        read(self.send(request).await?).await
    }

    pub(crate) async fn prompt_move(
        &self,
        id: &SessionId,
        prompt: &PromptId,
        position: u32,
    ) -> Result<Prompt> {
        let request = self.request(Method::PATCH, &format!("/v1/sessions/{id}/prompts/{prompt}"));
        read(self.send(request.json(&MovePrompt { position })).await?).await
    }

    pub(crate) async fn turns(&self, id: &SessionId) -> Result<Vec<Turn>> {
        self.all(&format!("/v1/sessions/{id}/turns")).await
    }

    /// `range` is a query string or empty.
    pub(crate) async fn diff(&self, id: &SessionId, range: &str) -> Result<String> {
        let response =
            self.send(self.request(Method::GET, &format!("/v1/sessions/{id}/diff{range}"))).await?;
        response.text().await.context("cannot read the diff")
    }

    pub(crate) async fn diff_files(&self, id: &SessionId, range: &str) -> Result<DiffFiles> {
        self.get(&format!("/v1/sessions/{id}/diff/files{range}")).await
    }

    pub(crate) async fn diff_sandbox(&self, id: &SessionId, range: &str) -> Result<FileChanges> {
        self.get(&format!("/v1/sessions/{id}/diff/sandbox{range}")).await
    }

    /// The snapshots that sessions hold, and those that retention would remove.
    pub(crate) async fn retention(&self) -> Result<RetentionReport> {
        self.get("/v1/retention").await
    }

    /// Applies the retention rules.
    pub(crate) async fn apply_retention(&self) -> Result<RetentionReport> {
        self.post("/v1/retention", &json!({})).await
    }

    pub(crate) async fn snapshots(&self, id: &SessionId) -> Result<Vec<Snapshot>> {
        self.all(&format!("/v1/sessions/{id}/snapshots")).await
    }

    pub(crate) async fn snapshot_pin(
        &self,
        id: &SessionId,
        snapshot: &SnapshotId,
        pinned: bool,
    ) -> Result<Snapshot> {
        let request = self.request(Method::PUT, &format!("/v1/sessions/{id}/snapshots/{snapshot}"));
        read(self.send(request.json(&PinSnapshot { pinned })).await?).await
    }

    pub(crate) async fn pull_request(&self, id: &SessionId) -> Result<PullRequest> {
        self.get(&format!("/v1/sessions/{id}/pull")).await
    }

    /// A page of events after `after`.
    pub(crate) async fn events(
        &self,
        id: &SessionId,
        after: u64,
    ) -> Result<Page<harvest_proto::Event>> {
        self.get(&format!("/v1/sessions/{id}/events?after={after}&limit=1000")).await
    }

    /// The full text of a truncated tool input or output.
    pub(crate) async fn blob(&self, id: &SessionId, blob: &BlobId) -> Result<String> {
        let response = self
            .send(self.request(Method::GET, &format!("/v1/sessions/{id}/blobs/{blob}")))
            .await?;
        response.text().await.context("cannot read the blob")
    }

    pub(crate) async fn exec(&self, id: &SessionId, body: &ExecRequest) -> Result<Lines> {
        let request = self.request(Method::POST, &format!("/v1/sessions/{id}/exec")).json(body);
        Ok(Lines::new(self.send(request).await?))
    }

    pub(crate) async fn repositories(&self) -> Result<Vec<Repository>> {
        self.all("/v1/repositories").await
    }

    /// The repository that a user means.
    pub(crate) async fn repository(&self, name: &RepositoryRef) -> Result<Repository> {
        let mut found = self.all(&format!("/v1/repositories?name={name}")).await?;
        found.pop().with_context(|| format!("there is no repository {name}"))
    }

    pub(crate) async fn repository_add(&self, body: &AddRepository) -> Result<Repository> {
        self.post("/v1/repositories", body).await
    }

    pub(crate) async fn repository_delete(&self, name: &RepositoryName) -> Result<()> {
        let path = format!("/v1/repositories/{name}");
        self.send(self.request(Method::DELETE, &path)).await.map(drop)
    }

    pub(crate) async fn repository_build(&self, name: &RepositoryName) -> Result<Lines> {
        let path = format!("/v1/repositories/{name}/build");
        Ok(Lines::new(self.send(self.request(Method::POST, &path)).await?))
    }

    pub(crate) async fn secrets(&self) -> Result<Vec<String>> {
        self.all("/v1/secrets").await
    }

    pub(crate) async fn secret_set(&self, name: &str, value: &Secret<String>) -> Result<()> {
        let path = format!("/v1/secrets/{}", path_segment(name)?);
        let request = self.request(Method::PUT, &path).json(&json!({ "value": value.expose() }));
        self.send(request).await.map(drop)
    }

    pub(crate) async fn secret_delete(&self, name: &str) -> Result<()> {
        let path = format!("/v1/secrets/{}", path_segment(name)?);
        self.send(self.request(Method::DELETE, &path)).await.map(drop)
    }

    pub(crate) async fn tokens(&self) -> Result<Vec<Token>> {
        self.all("/v1/tokens").await
    }

    pub(crate) async fn token_create(&self, body: &CreateToken) -> Result<CreatedToken> {
        // Without an idempotency key: the server would store the response, and with it the token.
        read(self.send(self.request(Method::POST, "/v1/tokens").json(body)).await?).await
    }

    pub(crate) async fn token_delete(&self, name: &str) -> Result<()> {
        let path = format!("/v1/tokens/{}", path_segment(name)?);
        self.send(self.request(Method::DELETE, &path)).await.map(drop)
    }

    pub(crate) async fn me(&self) -> Result<Me> {
        self.get("/v1/me").await
    }
}
