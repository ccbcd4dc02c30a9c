//! Requests of `gh` as they were recorded, changed ones, and hostile ones.

use std::sync::Mutex;

use proptest::prelude::*;

use super::*;

const RECORDED: &str = include_str!("documents/recorded.jsonl");

/// One repository, `acme/shop`, with one pull request. Records what was asked of it.
#[derive(Default)]
struct OneRepository {
    asked: Mutex<Vec<String>>,
}

impl OneRepository {
    fn known(&self, repository: &RepositoryName) -> Result<(), GraphqlRefusal> {
        let known = ["acme/shop", "local/app"].contains(&repository.as_str());
        known.then_some(()).ok_or_else(|| GraphqlRefusal::new("not a repository of this session"))
    }

    fn record(&self, what: String) {
        self.asked.lock().unwrap().push(what);
    }
}

#[async_trait]
impl GraphqlBackend for OneRepository {
    async fn read(
        &self,
        repository: &RepositoryName,
        route: ReadRoute,
    ) -> Result<ReadAnswer, GraphqlRefusal> {
        self.known(repository)?;
        let path = route.path();
        self.record(format!("read {path}"));
        let repository = json!({"full_name": "acme/shop"});
        let side = |branch: &str| json!({"ref": branch, "sha": "c0ffee", "repo": repository});
        let pull = json!({
            "number": 3, "id": 9, "state": "open", "merged_at": null, "title": "T",
            "html_url": "https://forge/3", "draft": false, "head": side("harvest/x"),
            "base": side("main"), "user": {"login": "ada", "node_id": "U1"},
        });
        let body = match path.as_str() {
            "" => json!({"default_branch": "main", "id": 1, "owner": {"login": "acme"}}),
            "/pulls" => json!([pull]),
            "/pulls/3" => pull,
            "/commits/c0ffee/status" => json!({"statuses": []}),
            "/commits/c0ffee/check-runs" => json!({"check_runs": []}),
            _ => json!([]),
        };
        Ok(ReadAnswer { status: 200, body: body.to_string().into_bytes(), next: None })
    }

    async fn login(&self) -> Result<String, GraphqlRefusal> {
        Ok("ada".into())
    }

    fn may_push(&self, _: &RepositoryName) -> bool {
        true
    }

    fn base(&self, _: &RepositoryName) -> Option<String> {
        None
    }

    async fn open_pull_request(
        &self,
        repository: &RepositoryName,
        wanted: WantedPullRequest,
    ) -> Result<(u64, String), GraphqlRefusal> {
        self.known(repository)?;
        self.record(format!("open {} from {} draft {}", wanted.title, wanted.head, wanted.draft));
        Ok((4, "https://forge/4".into()))
    }

    async fn comment(
        &self,
        repository: &RepositoryName,
        number: u64,
        body: String,
    ) -> Result<String, GraphqlRefusal> {
        self.known(repository)?;
        self.record(format!("comment {number} {body}"));
        Ok("https://forge/3#1".into())
    }
}

async fn ask(backend: &OneRepository, request: &Value) -> Value {
    answer(backend, request.to_string().as_bytes()).await
}

fn request_of(name: &str) -> Value {
    let line = RECORDED.lines().find(|line| line.contains(name)).unwrap();
    // The ids of the server that was recorded.
    let line = line.replace("\"PR3\"", "\"harvest:pull:local/app:3\"");
    serde_json::from_str(&line.replace("\"R1\"", "\"harvest:repository:local/app\"")).unwrap()
}

#[tokio::test]
async fn recorded_requests_of_gh_are_answered() {
    let backend = OneRepository::default();
    for name in [
        "PullRequestList",
        "PullRequestForBranch",
        "PullRequestByNumber",
        "PullRequestProjectItems",
        "RepositoryInfo",
        "Issue_fields",
        "PullRequestCreate",
        "CommentCreate",
        "UserCurrent",
    ] {
        let answer = ask(&backend, &request_of(name)).await;
        assert!(answer.get("data").is_some(), "{name}: {answer}");
    }
    let asked = backend.asked.lock().unwrap().clone();
    assert!(asked.contains(&"open T from harvest/x draft false".to_owned()), "{asked:?}");
    assert!(asked.contains(&"comment 3 hi".to_owned()), "{asked:?}");
}

#[tokio::test]
async fn every_recorded_request_is_served() {
    let backend = OneRepository::default();
    for line in RECORDED.lines() {
        let line = line.replace("\"PR3\"", "\"harvest:pull:local/app:3\"");
        let line = line.replace("\"R1\"", "\"harvest:repository:local/app\"");
        let answer = answer(&backend, line.as_bytes()).await;
        assert!(answer.get("data").is_some(), "{line}: {answer}");
    }
}

#[tokio::test]
async fn changed_variables_are_refused() {
    let backend = OneRepository::default();
    for (name, at, value) in [
        ("PullRequestList", "/variables/repo", json!("other")),
        ("PullRequestList", "/variables/repo", json!("../../app")),
        ("PullRequestList", "/variables/limit", json!("30")),
        ("PullRequestByNumber", "/variables/pr_number", json!(-1)),
        ("PullRequestByNumber", "/variables/pr_number", json!({"gt": 1})),
        ("CommentCreate", "/variables/input/subjectId", json!("PR_kwDOABCD")),
        ("CommentCreate", "/variables/input/subjectId", json!("harvest:pull:other/app:3")),
        ("PullRequestCreate", "/variables/input/repositoryId", json!("R_kgDO")),
        ("PullRequestCreate", "/variables/input/draft", json!("no")),
    ] {
        let mut request = request_of(name);
        *request.pointer_mut(at).unwrap() = value.clone();
        let answer = ask(&backend, &request).await;
        assert!(answer.get("errors").is_some(), "{at} {value}: {answer}");
    }
    let mut more = request_of("PullRequestCreate");
    more["variables"]["input"]["headRepositoryId"] = "R_other".into();
    assert!(ask(&backend, &more).await.get("errors").is_some());
    let mut named = request_of("PullRequestByNumber");
    named["operationName"] = "Other".into();
    assert!(ask(&backend, &named).await.get("errors").is_some());
    assert!(backend.asked.lock().unwrap().is_empty(), "nothing was read or written");
}

#[tokio::test]
async fn hostile_bodies_are_refused_without_reads() {
    let backend = OneRepository::default();
    let list = request_of("PullRequestList");
    let batch = Value::Array(vec![list.clone(), list.clone()]);
    let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
    let twice = format!("{{\"query\":\"{{viewer{{login}}}}\",{}", &list.to_string()[1..]);
    let spread = "fragment a on Query{...b} fragment b on Query{...a} {...a}";
    let many = format!("{{{}}}", "viewer{login} ".repeat(2000));
    for body in [
        batch.to_string(),
        deep,
        twice,
        String::new(),
        "null".into(),
        json!({"query": spread}).to_string(),
        json!({"query": many}).to_string(),
        json!({"query": "{viewer{login}}", "operationName": "PullRequestList"}).to_string(),
        "{\"query\":\"{\\u0076iewer{login}}\"}".into(),
        json!({"query": list["query"], "extensions": {"persistedQuery": {}}}).to_string(),
    ] {
        let answer = answer(&backend, body.as_bytes()).await;
        assert!(answer.get("errors").is_some(), "{body}: {answer}");
    }
    assert!(backend.asked.lock().unwrap().is_empty());
}

proptest! {
    #[test]
    fn ids_are_read_as_they_were_written(number in any::<u64>()) {
        let repository: RepositoryName = "acme/shop".parse().unwrap();
        let id = NodeId::Pull(repository, number);
        prop_assert_eq!(id.to_string().parse::<NodeId>(), Ok(id));
    }
}
