//! Uses the forge as a GitHub App does, with the client library octocrab. Arguments: the URL of the
//! API, the file of the App's key, its id, the repository, and a branch with a change. The
//! authorities that TLS trusts are in `SSL_CERT_FILE`. Prints what it saw as JSON.

use std::{env, error::Error, fs};

use jsonwebtoken::EncodingKey;
use octocrab::{
    Octocrab,
    models::{IssueState, StatusState, issues::Comment},
    params::{State, repos::Reference},
};
use serde_json::json;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [url, key, id, repository, branch] = arguments.as_slice() else {
        return Err("usage: octocrab-peer URL KEY_FILE APP_ID OWNER/REPOSITORY BRANCH".into());
    };
    let (owner, name) = repository.split_once('/').ok_or("the repository has no owner")?;

    let key = EncodingKey::from_rsa_pem(&fs::read(key)?)?;
    let app = Octocrab::builder().base_uri(url.as_str())?.app(id.parse::<u64>()?.into(), key);
    let app = app.build()?;
    let installation = app.apps().get_repository_installation(owner, name).await?;
    let (client, _token) = app.installation_and_token(installation.id).await?;

    let repos = client.repos(owner, name);
    let found = repos.get().await?;
    let base = found.default_branch.ok_or("the repository has no default branch")?;
    let content = repos.get_content().path("one").r#ref(&base).send().await?;
    let content = content.items.first().and_then(|file| file.decoded_content());

    let pulls = client.pulls(owner, name);
    let pull = pulls.create("From octocrab", branch, &base).body("A body").send().await?;
    let again = match pulls.create("Twice", branch, &base).send().await {
        Ok(_) => "created".to_owned(),
        Err(octocrab::Error::GitHub { source, .. }) => {
            let first = source.errors.unwrap_or_default().into_iter().next().unwrap_or_default();
            format!("{} {}", source.status_code.as_u16(), first["message"])
        }
        Err(other) => return Err(other.into()),
    };
    let head = format!("{owner}:{branch}");
    let listed = pulls.list().state(State::Open).head(head).base(&base).send().await?;

    let sha = pull.head.sha.clone();
    let status = repos.create_status(sha.clone(), StatusState::Success);
    let status = status.context("octocrab".into()).description("It works".into());
    let status = status.target("https://example.org/log".into()).send().await?;
    let combined = repos.combined_status_for_ref(&Reference::Branch(branch.clone())).await?;

    let issues = client.issues(owner, name);
    let first = issues.create_comment(pull.number, "Looks bad").await?;
    issues.create_comment(pull.number, "Thank you").await?;
    // `update_comment` sends POST, which GitHub's description does not have.
    let route = format!("/repos/{repository}/issues/comments/{}", first.id);
    let _: Comment = client.patch(route, Some(&json!({"body": "Looks good"}))).await?;
    // octocrab follows links to further pages with an App's token at api.github.com only.
    let comments = issues.list_comments(pull.number).per_page(1).send().await?;
    let pages = comments.number_of_pages();
    let second = issues.list_comments(pull.number).per_page(1).page(2u32).send().await?;
    let comments = comments.into_iter().chain(second);

    let changed = pulls.update(pull.number).title("Better").body("More").send().await?;
    let before = pulls.is_merged(pull.number).await?;
    let merge = pulls.merge(pull.number).title("Merged by octocrab").sha(sha).send().await?;
    let after = pulls.get(pull.number).await?;

    let seen = json!({
        "installed_for": installation.account.login,
        "repository": found.full_name,
        "base": base,
        "content": content,
        "pull": json!([pull.number, pull.user.map(|user| user.login), pull.state, pull.mergeable]),
        "again": again,
        "listed": listed.into_iter().map(|pull| pull.number).collect::<Vec<_>>(),
        "status": json!([status.state, status.creator.map(|user| user.login)]),
        "combined": json!([combined.state, combined.total_count]),
        "comments": comments.map(|comment| comment.body).collect::<Vec<_>>(),
        "pages": pages,
        "changed": [changed.title, changed.body],
        "merged": [before, merge.merged, pulls.is_merged(pull.number).await?],
        "closed": after.state == Some(IssueState::Closed) && after.merged_at.is_some(),
        "merge_commit": [merge.sha, after.merge_commit_sha],
    });
    println!("{seen}");
    Ok(())
}
