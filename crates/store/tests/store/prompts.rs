//! Prompts: a queue with an order, and one at a time.

use harvest_proto::PromptId;
use harvest_store::{StoreError, Write};

use crate::home::{Home, dispatch, on_both, prompt};

on_both! {
    at_most_one_prompt_of_a_session_is_dispatched,
    of_many_that_dispatch_at_once_one_wins,
    the_queue_keeps_the_order_it_is_given,
    a_text_with_a_zero_byte_is_kept_readable,
}

async fn at_most_one_prompt_of_a_session_is_dispatched(home: Home) {
    let (session, other) = (home.session().await, home.session().await);
    let (first, second, third) = (PromptId::random(), PromptId::random(), PromptId::random());
    home.commit(&session, vec![prompt(&first), prompt(&second), dispatch(&first)]).await.unwrap();
    home.commit(&other, vec![prompt(&third), dispatch(&third)]).await.unwrap();
    assert!(matches!(
        home.commit(&session, vec![dispatch(&second)]).await,
        Err(StoreError::Exists { .. })
    ));
    assert!(matches!(
        home.commit(&session, vec![dispatch(&first)]).await,
        Err(StoreError::NotFound { .. })
    ));
    assert_eq!(home.store.prompt_queue(&session).await.unwrap(), [second]);
}

async fn of_many_that_dispatch_at_once_one_wins(home: Home) {
    let session = home.session().await;
    let ids: Vec<PromptId> = (0..20).map(|_| PromptId::random()).collect();
    home.commit(&session, ids.iter().map(prompt).collect()).await.unwrap();
    let all: Vec<_> = ids
        .iter()
        .map(|id| {
            let (store, session, lease, write) =
                (home.store.clone(), session.clone(), home.lease, dispatch(id));
            tokio::spawn(async move {
                store.session_commit(&session, lease, crate::home::NOW, vec![write]).await
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
    assert_eq!(home.store.prompt_queue(&session).await.unwrap().len(), 19);
}

async fn the_queue_keeps_the_order_it_is_given(home: Home) {
    let session = home.session().await;
    let ids: Vec<PromptId> = (0..3).map(|_| PromptId::random()).collect();
    home.commit(&session, ids.iter().map(prompt).collect()).await.unwrap();
    let order = vec![ids[2].clone(), ids[0].clone(), ids[1].clone()];
    home.commit(&session, vec![Write::PromptOrder(order.clone())]).await.unwrap();
    assert_eq!(home.store.prompt_queue(&session).await.unwrap(), order);
    assert_eq!(home.store.prompt_get(&session, &ids[2]).await.unwrap().position, Some(1));
    let late = PromptId::random();
    home.commit(&session, vec![prompt(&late)]).await.unwrap();
    assert_eq!(home.store.prompt_get(&session, &late).await.unwrap().position, Some(4));
}

/// PostgreSQL has no such text; so neither database gets one.
async fn a_text_with_a_zero_byte_is_kept_readable(home: Home) {
    let session = home.session().await;
    let id = PromptId::random();
    let Write::PromptInsert(mut new) = prompt(&id) else { panic!("not a prompt") };
    new.text = "a\0b".into();
    let diff = Write::Diff("+\0\n".into());
    let title = Write::Title("\0".into());
    home.commit(&session, vec![Write::PromptInsert(new), diff, title]).await.unwrap();
    assert_eq!(home.store.prompt_get(&session, &id).await.unwrap().text, "a\u{2400}b");
    assert_eq!(home.store.session_diff(&session).await.unwrap().as_deref(), Some("+\u{2400}\n"));
    assert_eq!(home.store.session_get(&session).await.unwrap().session.title, "\u{2400}");
}
