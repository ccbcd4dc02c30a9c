//! Prompts: order of the queue, and at most one dispatched.

use harvest_proto::{
    PromptId,
    api::{Artifact, Attachment, PromptStatus},
    image::ImageType,
};
use harvest_store::{NewAttachment, Removal, StoreError, Write};

use crate::test_store::{NOW, TestStore, dispatch, on_both, prompt};

on_both! {
    at_most_one_prompt_is_dispatched,
    one_of_many_concurrent_dispatches_wins,
    queue_keeps_its_given_order,
    nul_characters_are_replaced,
    attachments_go_with_cancelled_prompt,
    attachments_go_with_their_session,
    artifact_contents_go_with_their_last_session,
}

async fn at_most_one_prompt_is_dispatched(test: TestStore) {
    let (session, other) = (test.session().await, test.session().await);
    let (first, second, third) = (PromptId::random(), PromptId::random(), PromptId::random());
    test.commit(&session, vec![prompt(&first), prompt(&second), dispatch(&first)]).await.unwrap();
    test.commit(&other, vec![prompt(&third), dispatch(&third)]).await.unwrap();
    assert!(matches!(
        test.commit(&session, vec![dispatch(&second)]).await,
        Err(StoreError::Exists { .. })
    ));
    assert!(matches!(
        test.commit(&session, vec![dispatch(&first)]).await,
        Err(StoreError::NotFound { .. })
    ));
    assert_eq!(test.store.prompt_queue(&session).await.unwrap(), [second]);
}

async fn one_of_many_concurrent_dispatches_wins(test: TestStore) {
    let session = test.session().await;
    let ids: Vec<PromptId> = (0..20).map(|_| PromptId::random()).collect();
    test.commit(&session, ids.iter().map(prompt).collect()).await.unwrap();
    let all: Vec<_> = ids
        .iter()
        .map(|id| {
            let (store, session, lease, write) =
                (test.store.clone(), session.clone(), test.lease, dispatch(id));
            tokio::spawn(async move {
                store.session_commit(&session, lease, crate::test_store::NOW, vec![write]).await
            })
        })
        .collect();
    let mut won = 0;
    for done in all {
        match done.await.unwrap() {
            Ok(_) => won += 1,
            Err(StoreError::Exists { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!(won, 1);
    assert_eq!(test.store.prompt_queue(&session).await.unwrap().len(), 19);
}

async fn queue_keeps_its_given_order(test: TestStore) {
    let session = test.session().await;
    let ids: Vec<PromptId> = (0..3).map(|_| PromptId::random()).collect();
    test.commit(&session, ids.iter().map(prompt).collect()).await.unwrap();
    let order = vec![ids[2].clone(), ids[0].clone(), ids[1].clone()];
    test.commit(&session, vec![Write::QueueOrder(order.clone())]).await.unwrap();
    assert_eq!(test.store.prompt_queue(&session).await.unwrap(), order);
    assert_eq!(test.store.prompt_get(&session, &ids[2]).await.unwrap().position, Some(1));
    let late = PromptId::random();
    test.commit(&session, vec![prompt(&late)]).await.unwrap();
    assert_eq!(test.store.prompt_get(&session, &late).await.unwrap().position, Some(4));
}

/// PostgreSQL cannot store NUL, so neither database gets it.
async fn nul_characters_are_replaced(test: TestStore) {
    let session = test.session().await;
    let id = PromptId::random();
    let Write::PromptInsert(mut new) = prompt(&id) else { panic!("not a prompt") };
    new.text = "a\0b".parse().unwrap();
    let diff = Write::Diff("+\0\n".into());
    let title = Write::Title("\0".into());
    test.commit(&session, vec![Write::PromptInsert(new), diff, title]).await.unwrap();
    assert_eq!(test.store.prompt_get(&session, &id).await.unwrap().text, "a\u{2400}b");
    assert_eq!(test.store.session_diff(&session).await.unwrap().as_deref(), Some("+\u{2400}\n"));
    assert_eq!(test.store.session_get(&session).await.unwrap().session.title, "\u{2400}");
}

/// A prompt with two images.
fn with_images(id: &PromptId) -> Write {
    let Write::PromptInsert(mut new) = prompt(id) else { panic!("not a prompt") };
    let info = Attachment { media_type: ImageType::Png, bytes: 3 };
    let attachment = |base64: &str| NewAttachment { info: info.clone(), base64: base64.into() };
    new.model = Some("m".parse().unwrap());
    new.attachments = vec![attachment("YWJj"), attachment("ZGVm")];
    Write::PromptInsert(new)
}

async fn attachments_go_with_cancelled_prompt(test: TestStore) {
    let (session, id, other) = (test.session().await, PromptId::random(), PromptId::random());
    let cancel = Write::PromptStatus {
        prompt: id.clone(),
        from: PromptStatus::Queued,
        to: PromptStatus::Cancelled,
    };
    let writes = vec![with_images(&id), with_images(&other), cancel];
    test.commit(&session, writes).await.unwrap();
    assert!(test.store.attachment_get(&session, &id, 1).await.is_err());
    assert_eq!(test.store.attachment_get(&session, &other, 1).await.unwrap(), "YWJj");
    assert_eq!(test.store.prompt_get(&session, &id).await.unwrap().attachments.len(), 2);
}

async fn attachments_go_with_their_session(test: TestStore) {
    let (session, id) = (test.session().await, PromptId::random());
    test.commit(&session, vec![with_images(&id)]).await.unwrap();
    let stored = test.store.prompt_get(&session, &id).await.unwrap();
    assert_eq!((stored.model.as_deref(), stored.attachments.len()), (Some("m"), 2));
    assert_eq!(test.store.attachment_get(&session, &id, 2).await.unwrap(), "ZGVm");
    assert!(test.store.attachment_get(&session, &id, 3).await.is_err());
    test.store.session_delete(&session, test.lease, Vec::new(), NOW).await.unwrap();
    assert!(test.store.attachment_get(&session, &id, 1).await.is_err());
}

async fn artifact_contents_go_with_their_last_session(test: TestStore) {
    let (one, two) = (test.session().await, test.session().await);
    let artifact = |name: &str| Artifact {
        name: name.into(),
        media_type: "text/plain".into(),
        bytes: 7,
        sha256: "c0ffee".into(),
        created_at: NOW,
    };
    let add = |name| Write::Artifact(Box::new(artifact(name)));
    test.commit(&one, vec![add("a"), add("b")]).await.unwrap();
    assert!(matches!(test.commit(&one, vec![add("a")]).await, Err(StoreError::Exists { .. })));
    test.commit(&two, vec![add("a")]).await.unwrap();
    assert_eq!(test.store.artifact_list(&one).await.unwrap(), [artifact("a"), artifact("b")]);
    let left = test.store.session_delete(&one, test.lease, Vec::new(), NOW).await.unwrap();
    assert!(left.is_empty() && test.store.artifact_exists("c0ffee").await.unwrap());
    let last = test.store.session_delete(&two, test.lease, Vec::new(), NOW).await.unwrap();
    assert_eq!(last, [Removal::Artifact("c0ffee".into())]);
    assert!(!test.store.artifact_exists("c0ffee").await.unwrap());
}
