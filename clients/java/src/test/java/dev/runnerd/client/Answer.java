package dev.runnerd.client;

import dev.runnerd.v1.Finish;
import dev.runnerd.v1.OutputChunk;
import dev.runnerd.v1.Token;
import java.util.ArrayList;
import java.util.List;

/** What a stream has given for its only output. */
final class Answer {
  final StringBuilder text = new StringBuilder();
  final List<Integer> ids = new ArrayList<>();
  final List<Finish> finishes = new ArrayList<>();
  int chunks;
  long bytes;

  static Answer of(GenerationStream stream) {
    Answer answer = new Answer();
    stream.forEach(answer::add);
    return answer;
  }

  void add(OutputChunk chunk) {
    if (!finishes.isEmpty()) {
      throw new AssertionError("a chunk came after the finish");
    }
    chunks++;
    bytes += chunk.getSerializedSize();
    text.append(chunk.getText());
    chunk.getTokensList().stream().map(Token::getId).forEach(ids::add);
    if (chunk.hasFinish()) {
      finishes.add(chunk.getFinish());
    }
  }
}
